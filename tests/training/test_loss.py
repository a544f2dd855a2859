import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.loss import IGNORED_LABEL, chunked_cross_entropy

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 200, 48, 259


def _inputs(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator).to(dtype)
    weight = (0.2 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    labels[::7] = IGNORED_LABEL
    return hidden, weight, labels


def _gradients(loss_function, hidden, weight):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_function(hidden, weight)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def _error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def _compare(dtype, chunk_tokens):
    scale = torch.tensor(1 / 321)
    hidden, weight, labels = _inputs(dtype)
    actual = _gradients(
        lambda h, w: chunked_cross_entropy(h, w, labels, scale, chunk_tokens=chunk_tokens), hidden, weight
    )
    expected = _gradients(
        lambda h, w: F.cross_entropy(h @ w.t(), labels, reduction="sum") * scale.double(),
        hidden.double(),
        weight.double(),
    )
    return [_error(*pair) for pair in zip(actual, expected, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-3), (torch.float32, 1e-6), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("chunk_tokens", [1, 64, 200, 1000])
def test_loss_and_gradients_match_a_float64_reference(dtype, tolerance, chunk_tokens):
    assert max(_compare(dtype, chunk_tokens)) < tolerance


def test_the_incoming_gradient_is_a_factor():
    hidden, weight, labels = _inputs(torch.float32)
    one = torch.ones(())
    plain = _gradients(lambda h, w: chunked_cross_entropy(h, w, labels, one), hidden, weight)
    tripled = _gradients(lambda h, w: 3 * chunked_cross_entropy(h, w, labels, one), hidden, weight)
    for once, thrice in zip(plain, tripled, strict=True):
        torch.testing.assert_close(3 * once, thrice)


def test_ignored_labels_have_neither_loss_nor_gradient():
    hidden, weight, _ = _inputs(torch.float32)
    labels = torch.full((NUM_TOKENS,), IGNORED_LABEL)
    for value in _gradients(lambda h, w: chunked_cross_entropy(h, w, labels, torch.ones(())), hidden, weight):
        assert not value.any()


def test_a_weight_shared_with_the_embedding_gets_both_gradients():
    _, weight, labels = _inputs(torch.float64)
    ids = labels.clamp(min=0)

    def with_chunks(weight):
        return chunked_cross_entropy(
            F.embedding(ids, weight).tanh(), weight, labels, torch.ones(()), chunk_tokens=64
        )

    def reference(weight):
        return F.cross_entropy(F.embedding(ids, weight).tanh() @ weight.t(), labels, reduction="sum")

    gradients = []
    for function in (with_chunks, reference):
        leaf = weight.clone().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_without_gradients_the_loss_is_the_same():
    hidden, weight, labels = _inputs(torch.float32)
    expected = chunked_cross_entropy(hidden.requires_grad_(), weight, labels, torch.ones(()))
    with torch.no_grad():
        torch.testing.assert_close(
            chunked_cross_entropy(hidden, weight, labels, torch.ones(())), expected.detach()
        )


class _LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_the_logits_of_all_tokens_never_exist_forward_or_backward():
    hidden, weight, labels = _inputs(torch.float32)
    with _LargestTensor() as largest:
        chunked_cross_entropy(
            hidden.requires_grad_(), weight, labels, torch.ones(()), chunk_tokens=20
        ).backward()
    assert largest.num_elements == weight.numel() < NUM_TOKENS * VOCAB_SIZE


class _Alive(TorchDispatchMode):
    """Notes how many tensors of one size exist whenever a matrix product begins."""

    def __init__(self, num_elements):
        super().__init__()
        self.num_elements = num_elements
        self.storages = {}
        self.at_products = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation._schema.name in ("aten::mm", "aten::addmm_"):
            alive = [storage for storage in self.storages.values() if not storage.expired()]
            self.at_products.append(len(alive))
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.num_elements:
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = StorageWeakRef(storage)
        return result


@pytest.mark.parametrize("with_gradients", [True, False])
def test_the_logits_of_a_chunk_are_gone_before_the_next_ones_come(with_gradients):
    hidden, weight, labels = _inputs(torch.float32)
    num_chunks, chunk_tokens = 4, NUM_TOKENS // 4
    with _Alive(chunk_tokens * VOCAB_SIZE) as alive, torch.set_grad_enabled(with_gradients):
        hidden.requires_grad_()
        chunked_cross_entropy(hidden, weight, labels, torch.ones(()), chunk_tokens=chunk_tokens)
    # Logits come from nothing of their size; the two products of gradients are with the logits' own alone.
    assert alive.at_products == ([0, 1, 1] if with_gradients else [0]) * num_chunks
