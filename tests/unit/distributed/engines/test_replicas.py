import pytest
import torch

from llmtrain.distributed.engines.engine import checksum, odd_ranks


def slowly(tensor):
    """Words of eight bytes, then the elements behind the last one, as Python adds them."""
    body = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    whole = len(body) - len(body) % 8
    size = tensor.element_size()
    words = [body[k : k + 8] for k in range(0, whole, 8)]
    rest = [body[k : k + size] for k in range(whole, len(body), size)]
    signed = size > 1
    total = sum(int.from_bytes(word, "little", signed=True) for word in words)
    total += sum(int.from_bytes(one, "little", signed=signed) for one in rest)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 9, 1001])
def test_a_checksum_is_the_sum_of_the_memory(dtype, size):
    torch.manual_seed(size)
    tensor = (torch.randn(size) * 100).to(dtype)
    assert int(checksum(tensor)) == slowly(tensor)


def test_a_checksum_takes_any_shape_and_what_begins_inside_a_word():
    tensor = torch.randn(3, 5, 7)
    assert int(checksum(tensor)) == slowly(tensor)
    assert int(checksum(tensor.view(-1)[1:])) == slowly(tensor.view(-1)[1:].clone())
    assert int(checksum(torch.tensor(1.5))) == slowly(torch.tensor([1.5]))


def test_any_single_bit_changes_a_checksum():
    tensor = torch.randn(5)
    before = int(checksum(tensor))
    bits = tensor.view(torch.uint8)
    for place in range(len(bits)):
        for bit in range(8):
            bits[place] ^= 1 << bit
            assert int(checksum(tensor)) != before
            bits[place] ^= 1 << bit
    assert int(checksum(tensor)) == before


def test_not_a_number_and_the_sign_of_zero_are_bits_like_others():
    nan = torch.tensor([float("nan"), 1.0])
    assert int(checksum(nan)) == int(checksum(nan.clone()))
    assert int(checksum(torch.tensor([0.0]))) != int(checksum(torch.tensor([-0.0])))


@pytest.mark.parametrize(
    ("sums", "shards", "expected"),
    [
        ([5, 5, 5], 1, []),
        ([5, 5, 6], 1, [2]),
        ([6, 5, 5], 1, [0]),  # the majority is right, not rank 0
        ([5, 6], 1, [0, 1]),  # nobody knows which
        ([5, 6, 5, 6], 1, [0, 1, 2, 3]),
        ([5, 6, 7], 1, [0, 1, 2]),
        ([5, 8, 5, 8, 5, 9], 2, [5]),  # ranks 0, 2, 4 and ranks 1, 3, 5
        ([5, 8, 5, 8], 2, []),
        ([5, 8, 6, 8], 2, [0, 2]),
    ],
)
def test_the_odd_ranks_are_those_that_hold_what_most_do_not(sums, shards, expected):
    assert odd_ranks(sums, shards) == expected


@pytest.mark.parametrize(("world_size", "shards"), [(3, 1), (8, 1), (6, 2), (12, 3)])
def test_an_odd_rank_among_many_is_found_wherever_it_is(world_size, shards):
    for wrong in range(world_size):
        sums = [rank % shards for rank in range(world_size)]
        sums[wrong] = 99
        assert odd_ranks(sums, shards) == [wrong]
