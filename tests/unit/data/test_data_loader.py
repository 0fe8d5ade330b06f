"""Looking ahead moves neither the data nor its place."""

from megavlm.config.schema import Config
from megavlm.data.batch_sampler import SequentialBatchSampler
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import ComputedCollator
from megavlm.data.data_loader import DataLoader
from megavlm.data.rank_loader import RankLoader
from megavlm.data.synthetic import SyntheticSource


def data_loader() -> DataLoader:
    source = SyntheticSource(Config())
    collator = ComputedCollator(source, CollateSpec.of(Config(), source, seq_length=64), with_patches=False)
    loader = RankLoader(SequentialBatchSampler(count=4), collator, dp_rank=0, dp_size=1, micro_batch_size=4)
    return DataLoader(loader)


def test_peek_shows_the_next_step_and_leaves_the_place():
    plain, peeking = data_loader(), data_loader()
    for _ in range(3):
        expected = plain.next_step()
        assert peeking.next_step().batches[0].text.tokens.equal(expected.batches[0].text.tokens)
        ahead = peeking.peek()
        assert peeking.peek() is ahead
        assert peeking.state_dict() == plain.state_dict()
    plain.close()
    peeking.close()


def test_a_loaded_place_forgets_what_was_seen():
    first = data_loader()
    start = first.state_dict()
    expected = first.next_step().batches[0].text.tokens
    first.peek()
    first.load_state_dict(start)
    assert first.next_step().batches[0].text.tokens.equal(expected)
    first.close()
