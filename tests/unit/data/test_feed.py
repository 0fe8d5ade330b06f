"""Looking ahead moves neither the data nor its place."""

from megavlm.config.schema import Config
from megavlm.data.composer import InOrder
from megavlm.data.feed import Feed
from megavlm.data.loader import Loader
from megavlm.data.making import InThread
from megavlm.data.synthetic import SyntheticSource


def feed() -> Feed:
    making = InThread(SyntheticSource(Config()), seq_length=64, with_patches=False)
    loader = Loader(InOrder(count=4), making, dp_rank=0, dp_size=1, micro_batch_size=4, global_batch_size=4)
    return Feed(loader)


def test_peek_shows_the_next_step_and_leaves_the_place():
    plain, peeking = feed(), feed()
    for _ in range(3):
        expected = plain.next_step()
        assert peeking.next_step().batches[0].tokens.equal(expected.batches[0].tokens)
        ahead = peeking.peek()
        assert peeking.peek() is ahead
        assert peeking.state_dict() == plain.state_dict()
    plain.close()
    peeking.close()


def test_a_loaded_place_forgets_what_was_seen():
    first = feed()
    start = first.state_dict()
    expected = first.next_step().batches[0].tokens
    first.peek()
    first.load_state_dict(start)
    assert first.next_step().batches[0].tokens.equal(expected)
    first.close()
