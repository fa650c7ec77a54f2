"""The losses of pairs of answers, and of answers that were judged, from their log-probabilities.

A sequence is worth the sum of the log-probabilities of its trained tokens, less that of the
reference. What a loss does with the two sums of a pair is one function of a few numbers, in fp64:
sums of hundreds of nats are subtracted from each other.

Of feedback (`kto`) the first sequence of a pair has the answer that was judged. The second has that
of another row: by it, the caller has measured how far the model is from its reference.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from llmtrain.config.schema import PreferenceConfig
from llmtrain.pairs import PAIR_SLOTS, PairTensors

_AVERAGED = ("dpo_norm", "ipo", "orpo", "simpo")  # a sum is divided by its number of tokens
_LEAST = 1e-7  # nats: a log-probability in fp32 cannot be told from 0 below it


def sequence_sums(log_probs: Tensor, lengths: Tensor) -> Tensor:
    """Return the log-probabilities of the two sequences of each pair, (N, 2) fp64.

    log_probs: (n,), of the trained positions
    lengths: (2N,) int64, how many of them each sequence has
    """
    wide = log_probs.double()
    if not len(lengths):
        return wide.new_zeros(0, 2) + wide.sum()  # so that it has a gradient
    # To check the lengths would wait for a GPU.
    sums = torch.segment_reduce(wide, "sum", lengths=lengths, unsafe=lengths.is_cuda)
    return sums.view(-1, 2)


def loss_and_sums(sums: Tensor, pairs: PairTensors, preference: PreferenceConfig) -> Tensor:
    """Return the summed loss of some pairs and the sums of `PAIR_SLOTS`: (1 + slots,) fp64.

    Only the loss has a gradient.

    sums: (N, 2) fp64, log-probabilities of both sequences; of a reward model, their scores
    """
    reward = rewards(sums.detach(), pairs, preference)
    if preference.answers == "feedback":
        assert pairs.desirable is not None, "feedback is desirable or not"
        assert pairs.divergence is not None, "a step measures it"
        divergence, second = pairs.divergence.detach(), 0
        chosen, rejected = pairs.desirable, ~pairs.desirable
        above = preference.beta * (sums[:, 0] - pairs.reference[:, 0] - divergence)
        above = torch.where(chosen, above, -above)
        losses = _judged_losses(above, chosen, preference)
    else:
        divergence, second = sums.new_zeros(()), 1
        chosen = rejected = torch.ones(len(sums), dtype=torch.bool, device=sums.device)
        above = reward[:, 0] - reward[:, 1]
        losses = pair_losses(sums, pairs, preference)
    logps, sizes = sums.detach(), pairs.sizes
    if preference.loss == "reward":
        logps = sizes = torch.zeros_like(reward)  # no token was predicted
    slots = {
        "pairs": losses.new_full((), len(sums)),
        "chosen": chosen.sum(),
        "rejected": rejected.sum(),
        "correct": (above.detach().sign() + 1).sum() / 2,  # a tie counts half
        "chosen_reward": (reward[:, 0] * chosen).sum(),
        "rejected_reward": (reward[:, second] * rejected).sum(),
        "chosen_logp": (logps[:, 0] * chosen).sum(),
        "rejected_logp": (logps[:, second] * rejected).sum(),
        "chosen_tokens": (sizes[:, 0] * chosen).sum(),
        "divergence": divergence * len(sums),
    }
    return torch.stack([losses.sum(), *(slots[name].double() for name in PAIR_SLOTS)])


def rewards(sums: Tensor, pairs: PairTensors, preference: PreferenceConfig) -> Tensor:
    """Return what the sequences of each pair are worth, (N, 2) fp64.

    It is β times the log-probability less that of the reference, as TRL reports it; of `orpo` and
    `simpo`, its mean over the tokens; of a reward model, the score.
    """
    if preference.loss == "reward":
        return sums
    worth = preference.beta * (sums - pairs.reference)
    return worth / pairs.sizes if preference.loss in ("orpo", "simpo") else worth


def pair_losses(sums: Tensor, pairs: PairTensors, preference: PreferenceConfig) -> Tensor:
    """Return the loss of each pair of a chosen and a rejected answer, (N,) fp64.

    sums: as `loss_and_sums` takes them
    """
    beta, swapped = preference.beta, preference.label_smoothing
    worth = sums - pairs.reference
    if preference.loss in _AVERAGED:
        worth = worth / pairs.sizes
    chosen, rejected = worth.unbind(1)
    margin = beta * (chosen - rejected)
    match preference.loss:
        case "dpo" | "dpo_norm" | "cpo":
            losses = -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)
        case "robust":
            losses = -(1 - swapped) * F.logsigmoid(margin) + swapped * F.logsigmoid(-margin)
            losses = losses / (1 - 2 * swapped)
        case "simpo":
            margin = margin - preference.gamma
            losses = -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)
        case "ipo":
            losses = (chosen - rejected - 1 / (2 * beta)).square()
        case "hinge":
            losses = F.relu(1 - margin)
        case "apo_zero":
            losses = 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "orpo":
            odds = chosen - rejected - (_log_of_rest(chosen) - _log_of_rest(rejected))
            losses = -chosen - beta * F.logsigmoid(odds)
        case "reward":
            return -F.logsigmoid(sums[:, 0] - sums[:, 1])
        case _:
            raise AssertionError(f"{preference.loss} is no loss of pairs")
    if preference.sft_weight:
        losses = losses - preference.sft_weight * sums[:, 0] / pairs.sizes[:, 0]
    return losses


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """Return log(1 − p). log_prob: log p"""
    return torch.log(-torch.expm1(log_prob.clamp(max=-_LEAST)))


def _judged_losses(above: Tensor, desirable: Tensor, preference: PreferenceConfig) -> Tensor:
    """Return the loss of each answer that was judged (KTO), (N,) fp64.

    above: (N,), β times how far a desirable answer is above the divergence, or another one below it
    """
    good, bad = preference.desirable_weight, preference.undesirable_weight
    weights = torch.where(desirable, above.new_tensor(good), above.new_tensor(bad))
    return weights * (1 - torch.sigmoid(above))
