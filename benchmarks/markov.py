"""A language that a model can learn in minutes: a Markov chain over some of the vocabulary's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

# Each token has four successors, with these probabilities: no model can have a lower loss than their entropy.
_PROBABILITIES = (0.5, 0.25, 0.15, 0.1)


def entropy() -> float:
    """The lowest loss there is, in nats per token."""
    probabilities = torch.tensor(_PROBABILITIES)
    return float(-(probabilities * probabilities.log()).sum())


class MarkovLanguage:
    """Sequences in which each token's successor is drawn from four that are its own.

    Args:
        vocab_size: of the model.
        num_states: tokens that occur.
        seed: of the successors.
        device: where sequences are made.
    """

    def __init__(self, vocab_size: int, num_states: int, seed: int, device: torch.device) -> None:
        self._device = device
        names = torch.Generator().manual_seed(5)  # which tokens occur is the same in every dialect
        self._tokens = torch.randperm(vocab_size, generator=names)[:num_states].to(device)
        self._successors = self._draw_successors(num_states, seed)

    def _draw_successors(self, num_states: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_states, len(_PROBABILITIES))
        return torch.randint(0, num_states, shape, generator=generator).to(self._device)

    def change_half(self, seed: int) -> None:
        """Gives every other token new successors: the language that a model is then fine-tuned on."""
        self._successors[::2] = self._draw_successors(len(self._successors), seed)[::2]

    def batches(
        self, num_batches: int, batch_size: int, seq_len: int, seed: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs (input_ids, labels), int64 [batch_size, seq_len]."""
        generator = torch.Generator(self._device).manual_seed(seed)
        num_sequences = num_batches * batch_size
        state = torch.randint(
            0, len(self._successors), (num_sequences,), generator=generator, device=self._device
        )
        probabilities = torch.tensor(_PROBABILITIES, device=self._device)
        states = [state]
        for _ in range(seq_len):
            choice = torch.multinomial(probabilities, num_sequences, replacement=True, generator=generator)
            state = self._successors[state, choice]
            states.append(state)
        sequences = self._tokens[torch.stack(states, dim=1)].view(num_batches, batch_size, seq_len + 1)
        return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in sequences]
