"""The model: its shapes, its padded vocabulary, and that the arms differ in attention alone."""

import pytest
import torch

from sagebwd.errors import UserError
from sagebwd.megatron.documents import packed_documents
from sagebwd.megatron.model import PaddedVocabGPT, build_model
from sagebwd.training.recipe import Attention, Data, Model, Recipe
from sagebwd.training.size import padded_vocab_size, parameter_counts
from sagebwd.training.world import World
from tests.training.runs import on_cpu

pytestmark = on_cpu
VOCAB = 200  # padded to 256
CONTEXT = 24


def recipe(kind: str = "fpa", **model: object) -> Recipe:
    shape = {"layers": 2, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2} | model
    data = Data(context=CONTEXT, vocab_size=VOCAB)
    return Recipe(name="test", model=Model(**shape), attention=Attention(kind=kind), data=data)


def build(*arguments: object, vocab_size: int = VOCAB, **model: object) -> PaddedVocabGPT:
    torch.manual_seed(0)
    return build_model(recipe(*arguments, **model), vocab_size, torch.float32)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (2, CONTEXT))
    return tokens, torch.arange(CONTEXT).expand(2, -1), tokens.roll(-1, 1)


def loss_of(model: PaddedVocabGPT) -> torch.Tensor:
    tokens, positions, labels = batch()
    return model(tokens, positions, None, labels=labels)


@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
def test_padding_is_never_predicted_and_changes_nothing(alone: World, kind: str) -> None:
    model = build(kind)
    tokens, positions, labels = batch()
    loss = model(tokens, positions, None, labels=labels)
    loss.mean().backward()
    embedding = model.embedding.word_embeddings.weight
    assert torch.equal(embedding.grad[VOCAB:], torch.zeros(256 - VOCAB, 32))
    with torch.no_grad():
        logits = model(tokens, positions, None)[..., :VOCAB]  # without labels Megatron returns the logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        torch.testing.assert_close(loss.flatten(), expected)
        embedding[VOCAB:] = 100.0  # what the padding holds cannot matter
        assert torch.equal(model(tokens, positions, None, labels=labels), loss)


def test_a_vocabulary_that_needs_no_padding(alone: World) -> None:
    assert loss_of(build(vocab_size=256)).isfinite().all()


def test_the_padding_does_not_depend_on_the_tensor_parallel_size() -> None:
    assert {padded_vocab_size(VOCAB, tensor) for tensor in (1, 2, 4, 8)} == {256}
    assert padded_vocab_size(256, 1) == 256
    with pytest.raises(UserError, match=r"parallel.tensor 3 .* 256"):
        padded_vocab_size(VOCAB, 3)


def test_the_arms_start_from_the_same_weights(alone: World) -> None:
    fpa, sagebwd = build("fpa").state_dict(), build("sagebwd").state_dict()
    assert fpa.keys() == sagebwd.keys()
    assert all(torch.equal(fpa[name], sagebwd[name]) for name in fpa if fpa[name] is not None)


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_switches_and_the_count_of_parameters(alone: World, qk_norm: bool, tied: bool) -> None:
    model = build("fpa", qk_norm=qk_norm, tied_embeddings=tied, head_dim=16)
    parameters = dict(model.named_parameters())
    assert any("q_layernorm" in name for name in parameters) == qk_norm
    assert ("output_layer.weight" in parameters) == (not tied)
    assert not any(name.endswith("bias") for name in parameters)
    counts = parameter_counts(recipe(qk_norm=qk_norm, tied_embeddings=tied, head_dim=16), VOCAB)
    assert counts["total"] == sum(p.numel() for p in parameters.values())
    embeddings = sum(p.numel() for name, p in parameters.items() if "embedding" in name or "output" in name)
    assert counts["non_embedding"] == counts["total"] - embeddings
    assert loss_of(model).mean().item() == pytest.approx(torch.log(torch.tensor(float(VOCAB))).item(), abs=0.1)


LENGTHS = (9, 15, 24)  # of the documents of `batch`, two sequences: the first holds two of them


def packed(model: PaddedVocabGPT, tokens: torch.Tensor, *lengths: int) -> torch.Tensor:
    """The losses of documents that lie in one row, [tokens]; each token's label is the next one."""
    positions = torch.cat([torch.arange(length) for length in lengths]).view(-1, CONTEXT)
    documents = packed_documents(positions, torch.device("cpu"))
    tokens, labels = tokens.view(1, -1), tokens.flatten().roll(-1)[None]
    return model(tokens, positions.view(1, -1), None, labels=labels, packed_seq_params=documents)[0]


def test_where_the_documents_of_a_micro_batch_lie() -> None:
    positions = torch.tensor([[0, 1, 2, 0], [0, 1, 0, 0], [0, 1, 2, 3]])
    documents = packed_documents(positions, torch.device("cpu"))
    assert documents.cu_seqlens_q.tolist() == documents.cu_seqlens_kv.tolist() == [0, 3, 4, 6, 7, 8, 12]
    assert documents.cu_seqlens_q.dtype is torch.int32
    assert (documents.qkv_format, documents.max_seqlen_q, documents.max_seqlen_kv) == ("thd", 4, 4)


@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
def test_a_document_neither_sees_nor_is_seen_by_the_others(alone: World, kind: str) -> None:
    """Bitwise: another token in the first leaves the losses of the others, and what they add to the gradients."""
    model, (tokens, _, _) = build(kind), batch()

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        losses = packed(model, tokens, *LENGTHS)
        losses[LENGTHS[0] :].sum().backward()
        return losses.detach(), [p.grad for p in model.parameters()]

    losses, gradients = run()
    tokens[0, 3] = (tokens[0, 3] + 1) % VOCAB
    others, same = run()
    assert torch.equal(losses[LENGTHS[0] :], others[LENGTHS[0] :])
    assert not torch.equal(losses[: LENGTHS[0]], others[: LENGTHS[0]])
    assert all(map(torch.equal, gradients, same))


@pytest.mark.parametrize(("kind", "error"), [("fpa", 1e-5), ("sagebwd", 1e-4)])
def test_packed_documents_lose_what_each_loses_alone(alone: World, kind: str, error: float) -> None:
    model, (tokens, positions, _) = build(kind), batch()
    losses = packed(model, tokens, *LENGTHS).split(LENGTHS)
    for document, ours in zip(tokens.flatten().split(LENGTHS), losses, strict=True):
        labels = document.roll(-1)[None]
        theirs = model(document[None], positions[:1, : len(document)], None, labels=labels)[0]
        torch.testing.assert_close(ours[:-1], theirs[:-1], atol=error, rtol=0)  # the last one's label differs


@pytest.mark.parametrize("sequences", [1, 2])
def test_positions_restart_at_each_document(alone: World, sequences: int) -> None:
    """Twice the same document: the same queries and keys after RoPE, also where the pack is as long as the context."""
    model, (tokens, _, _) = build("fpa"), batch()
    seen: list[torch.Tensor] = []
    core = model.decoder.layers[0].self_attention.core_attention
    core.register_forward_pre_hook(lambda module, arguments: seen.extend(arguments[:2]))
    half = CONTEXT // 2
    packed(model, tokens[0, :half].repeat(2 * sequences), *[half] * 2 * sequences)
    for rotated in seen:
        first, *others = rotated.split(half)
        assert all(torch.allclose(first, other, atol=1e-6) for other in others)
    assert len(seen) == 2


def test_the_future_is_not_seen(alone: World) -> None:
    model = build("fpa")
    tokens, positions, _ = batch()
    with torch.no_grad():
        before = model(tokens, positions, None)
        tokens[:, 10:] = 7
        after = model(tokens, positions, None)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])
