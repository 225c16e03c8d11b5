"""A second oracle for what NumPy checks bit for bit. Apart: under sanitizers torch takes too long to load."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matmul_harness import DENSE, EPS, INTS, Epilogue, Kind, available_isas, matmul, norm_rows, random_matrix


@pytest.mark.parametrize("kind", [INTS[0], INTS[3], INTS[8], INTS[-1], *DENSE], ids=str)
def test_products(kind: Kind) -> None:
    m, rng = random_matrix(kind, 80, 128), np.random.default_rng(1)
    x = rng.standard_normal((11, 128)).astype(np.float32)
    want = torch.nn.functional.linear(torch.from_numpy(x).double(), torch.from_numpy(m.w).double()).numpy()
    got = matmul(available_isas()[-1], x, m, "f32")
    np.testing.assert_allclose(got, want, rtol=0, atol=128 * 2.0**-24 * (np.abs(x) @ np.abs(m.w.T)).max())


def test_rms_norm() -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((9, 100)).astype(np.float32), rng.standard_normal(100).astype(np.float32)
    want = torch.nn.functional.rms_norm(
        torch.from_numpy(x).double(), (100,), torch.from_numpy(weight).double(), EPS
    )
    np.testing.assert_allclose(norm_rows(x, weight), want.numpy(), rtol=2e-6)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gelu"])
def test_activations(act: str) -> None:
    m, rng = random_matrix(DENSE[0], 33, 64), np.random.default_rng(3)
    x, gate = rng.standard_normal((5, 64)).astype(np.float32), rng.standard_normal((5, 33)).astype(np.float32)
    found = matmul(available_isas()[-1], x, m, "f32", Epilogue(gate=gate * 4, act=act))
    g = torch.from_numpy(gate * 4).double()
    if act == "silu":
        activated = torch.nn.functional.silu(g)
    else:
        activated = torch.nn.functional.gelu(g, approximate="tanh" if act == "gelu_tanh" else "none")
    want = activated.numpy() * (x.astype(np.float64) @ m.w.T)
    np.testing.assert_allclose(found, want, atol=3e-5)
