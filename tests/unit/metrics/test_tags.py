from megavlm.metrics.tags import tagged


def test_numbers_get_the_tags_that_people_expect() -> None:
    record = {
        "iteration": 3,
        "time": "2026-01-01",
        "loss": 2.5,
        "learning_rate": 1e-4,
        "mfu": None,
        "tokens_per_second": 12.0,
        "updated": True,
        "loss_by_source": {"a": 1.0, "b": None},
        "eval_count": 0.5,
        "imbalance_tokens": 1.1,
        "validation/loss": 2.0,
        "something_new": 7,
    }
    assert tagged(record) == {
        "train/loss": 2.5,
        "train/learning_rate": 1e-4,
        "perf/tokens_per_second": 12.0,
        "train/updated": True,
        "train/loss_by_source/a": 1.0,
        "validation/count": 0.5,
        "data/imbalance_tokens": 1.1,
        "validation/loss": 2.0,
        "other/something_new": 7,
    }
