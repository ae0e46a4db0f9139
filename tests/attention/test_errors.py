"""The measured errors: against autograd's truth in FP64, of the tensors that the backward really used, and additive."""

import math

import pytest
import torch

from sagebwd.attention import QuantConfig, captured, errors, reference
from sagebwd.attention.error_table import main
from sagebwd.errors import UserError
from tests.attention.helpers import inputs, rel_l2, truth


def measured(q, k, v, do, *configs: QuantConfig, scale: float = 0.2) -> list[dict[str, errors.Error]]:
    tallies = {config: errors.Tally() for config in configs}
    errors.measure(q, k, v, do, softmax_scale=scale, tallies=tallies)
    return [tally.errors() for tally in tallies.values()]


def test_the_truth_is_attention_in_float64():
    """Over more keys than one strip, with grouped heads; O and the gradients, and P and dS through what they make."""
    q, k, v, do = inputs(300, 300, 16, 4, 2, batch=2)
    expected = truth(q, k, v, do, causal=True, scale=0.2)
    ours = errors._Truth(q, k, v, do, 0.2)
    for x, true in zip(ours.outputs(), expected, strict=True):
        assert rel_l2(x, true) < 1e-12
    everything = slice(0, 300)
    p, _, ds = ours.tile(everything, everything)
    assert rel_l2((p @ ours.v).flatten(1, 2), expected[0]) < 1e-12
    assert rel_l2((ds @ ours.k).flatten(1, 2) * 0.2, expected[1]) < 1e-12


def test_with_scores_alone_the_observer_is_told_the_16_bit_operands():
    q, k, v, do = inputs(100, 100, 16, 4, 2, dtype=torch.bfloat16)
    args = {"causal": True, "softmax_scale": 0.2, "config": QuantConfig(products="scores", block_q=32, block_k=16)}
    o, saved = reference.forward(q, k, v, **args)
    dq, dk, dv = (torch.zeros_like(x) for x in (saved.q, saved.k_smooth, saved.k_smooth))
    grads16 = reference._pad_rows(do.float().unflatten(1, (2, 2)), 32)

    class Observer:
        def delta(self, delta):
            self.seen = delta

        def tile(self, rows, cols, *, p, dp, ds, p_rounded, ds_rounded):
            assert torch.equal(p_rounded, p.bfloat16().float())
            assert torch.equal(ds_rounded, (p * (dp - self.seen[..., rows, None])).bfloat16().float())
            dq[..., rows, :] += ds_rounded @ saved.k_smooth[:, :, None, cols] * 0.2
            dk[..., cols, :] += (ds_rounded.mT @ saved.q[..., rows, :]).sum(2) * 0.2
            dv[..., cols, :] += (p_rounded.mT @ grads16[..., rows, :]).sum(2)

    grads = reference.backward(do, v, o, saved, n=100, observer=Observer(), **args)
    for made, grad in zip((dq[..., :100, :].flatten(1, 2), dk[..., :100, :], dv[..., :100, :]), grads, strict=True):
        assert rel_l2(made, grad) < 1e-6


@pytest.mark.parametrize("granularity", ["tile", "row"])
@pytest.mark.parametrize("delta", ["stale", "matched"])
def test_what_the_observer_is_told_makes_the_gradients(granularity, delta):
    q, k, v, do = inputs(100, 100, 16, 4, 2)
    config = QuantConfig(granularity=granularity, delta=delta, block_q=32, block_k=16)
    args = {"causal": True, "softmax_scale": 0.2, "config": config}
    o, saved = reference.forward(q, k, v, **args)
    do_hat, do_scale = reference.quantise(
        reference._tiles(reference._pad_rows(do.unflatten(1, (2, 2)), 32), 32), (-2, -1)
    )
    do_rounded = (do_hat * do_scale).flatten(-3, -2)
    k_rounded = saved.k_hat * saved.k_scale.repeat_interleave(16, -1)[..., None]
    dq, dv = torch.zeros_like(saved.q_hat), torch.zeros_like(saved.k_hat)

    class Observer:
        def delta(self, delta):
            self.seen = delta

        def tile(self, rows, cols, *, p, dp, ds, p_rounded, ds_rounded):
            torch.testing.assert_close(ds, p * (dp - self.seen[..., rows, None]))
            dq[..., rows, :] += ds_rounded @ k_rounded[:, :, None, cols] * 0.2
            dv[..., cols, :] += (p_rounded.mT @ do_rounded[..., rows, :]).sum(2)

    grads = reference.backward(do, v, o, saved, n=100, observer=Observer(), **args)
    assert rel_l2(dq[..., :100, :].flatten(1, 2), grads[0]) < 1e-6
    assert rel_l2(dv[..., :100, :], grads[2]) < 1e-6


def test_the_errors_of_a_config():
    q, k, v, do = inputs(130, 130, 32, 4, 2)
    config = QuantConfig(granularity="tile")
    (found,) = measured(q, k, v, do, config)
    args = {"causal": True, "softmax_scale": 0.2, "config": config}
    o, saved = reference.forward(q, k, v, **args)
    ours = (o, *reference.backward(do, v, o, saved, n=130, **args))
    for name, x, true in zip(errors.OUTPUTS, ours, truth(q, k, v, do, causal=True, scale=0.2), strict=True):
        assert found[name].rel_l2 == pytest.approx(rel_l2(x, true), rel=1e-6)
        cosine = torch.nn.functional.cosine_similarity(x.double().flatten(), true.flatten(), dim=0).item()
        assert found[name].cos_sim == pytest.approx(cosine, abs=1e-9)
        assert found[name].rms == pytest.approx(true.square().mean().sqrt().item())
    assert found["dP"].rel_l2 < 1e-6  # 16-bit operands, as they came: nothing is rounded
    visible = torch.ones(130, 130, dtype=torch.bool).tril()
    dp = (do.double() @ v.double().repeat_interleave(2, 1).mT)[:, :, visible]
    assert found["dP"].rms == pytest.approx(dp.square().mean().sqrt().item())


def test_the_rules_differ_where_they_should():
    q, k, v, do = inputs(256, 256, 64, 4, 4)
    tile, row, matched = measured(
        q, k, v, do, QuantConfig(granularity="tile"), QuantConfig(), QuantConfig(delta="matched"), scale=0.125
    )
    assert row["P rounded"].rel_l2 < 0.6 * tile["P rounded"].rel_l2
    assert row["dS rounded"].rel_l2 < 0.6 * tile["dS rounded"].rel_l2
    assert row["P"] == tile["P"]
    assert row["dS"] == tile["dS"]
    assert matched["delta"].rel_l2 < row["delta"].rel_l2
    assert matched["P"] == row["P"]


def test_errors_are_those_of_all_heads_and_documents_together(monkeypatch):
    q, k, v, do = inputs(90, 90, 16, 6, 3, batch=2)
    (at_once,) = measured(q, k, v, do, QuantConfig())
    monkeypatch.setattr(errors, "ELEMENTS", 1)  # a head at a time
    tallies = {QuantConfig(): errors.Tally()}
    for entry in range(2):
        errors.measure(*(x[entry : entry + 1] for x in (q, k, v, do)), softmax_scale=0.2, tallies=tallies)
    for name, error in tallies[QuantConfig()].errors().items():
        assert error == pytest.approx(at_once[name], rel=1e-9), name


@pytest.mark.parametrize(("rows", "cols"), [((0, 9), (0, 9)), ((4, 7), (2, 5)), ((4, 7), (6, 20)), ((0, 3), (5, 8))])
def test_how_many_pairs_the_mask_leaves(rows, cols):
    expected = sum(col <= row for row in range(*rows) for col in range(*cols))
    assert errors._seen_of(slice(*rows), slice(*cols)) == expected


def test_nothing_true_is_no_error_but_nan():
    q, k, v, do = inputs(20, 20, 16, 1, 1)
    (found,) = measured(q, k, v, torch.zeros_like(do), QuantConfig())
    assert math.isnan(found["dQ"].rel_l2)
    assert found["O"].rel_l2 < 0.1


def test_captured_tensors_come_back_and_make_a_table(tmp_path, capsys, monkeypatch):
    path = tmp_path / "folder" / "captured.safetensors"
    layers = [[inputs(20 + layer, 20 + layer, 16, 2, 1, dtype=torch.bfloat16) for _ in range(2)] for layer in range(2)]
    captured.write(path, layers, softmax_scale=0.25, description="two layers")
    found = captured.Reader(path)
    assert (found.layers, found.softmax_scale, found.description) == (2, 0.25, "two layers")
    for layer, documents in enumerate(layers):
        for back, kept in zip(found.documents(layer, torch.device("cpu")), documents, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(back, kept, strict=True))
    monkeypatch.setattr("sagebwd.attention.error_table.SIGMAS", ())
    monkeypatch.setattr("sagebwd.attention.error_table.TOKENS", 64)
    assert main(["--captured", str(path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| captured | row, stale |")]
    batches = [[torch.cat(x) for x in zip(*layer, strict=True)] for layer in layers]
    of_layers = [measured(*batch, QuantConfig(), scale=0.25)[0] for batch in batches]
    means = [errors.mean([of_layer[name] for of_layer in of_layers]) for name in errors.OUTPUTS]
    cells = [f"{mean.rel_l2:.4f} / {mean.cos_sim:.5f}" for mean in means]
    assert rows == [f"| captured | row, stale | {' | '.join(cells)} |"]


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "not.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="no readable safetensors file"):
        captured.Reader(tmp_path / "not.safetensors")
    with pytest.raises(UserError, match="no file"):
        captured.Reader(tmp_path / "nowhere.safetensors")
