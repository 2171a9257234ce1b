"""The checks of `check_gpu.py` that need no model: operations and attention against float64 on the CPU."""

from __future__ import annotations

from typing import Any

from gpu_case import Case, Failed, Numbers, needs_gpu, within

# ---------------------------------------------------------------- operations


def operations(case: Case, *, dtype: str) -> Numbers:
    """What lies between the matrix products, with its gradients, against float64 on the CPU: relative differences."""
    import torch

    from whet.models import kernels, torch_ops

    kind, draw, found = getattr(torch, dtype), torch.Generator().manual_seed(0), {}
    ops, tokens = kernels.load("auto"), 37 if case.small else 517

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=draw)

    angle = normal(tokens, 96)
    turned = (angle.cos(), angle.sin())
    cases: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("norm", lambda o, x, w: o.rms_norm(x, w, 1e-6, offset=1.0), (normal(tokens, 896), normal(896))),
        ("add and norm", lambda o, x, y, w: torch.cat(o.add_rms_norm(x, y, w, 1e-6)),
         (normal(tokens, 3584), normal(tokens, 3584), normal(3584))),
        ("norm and rope", lambda o, x, w, *t: o.norm_rope(x, w, 1e-6, *t), (normal(tokens, 20, 96), normal(96))),
        ("rope", lambda o, x, *t: o.norm_rope(x, None, 1e-6, *t), (normal(tokens, 3, 96),)),
        *((act, lambda o, g, u, act=act: o.glu(g, u, act=act), (3 * normal(tokens, 1100), 5 * normal(tokens, 1100)))
          for act in ("silu", "gelu_tanh", "swigluoai")),
    ]  # fmt: skip
    for name, run, given in cases:
        far: list[list[Any]] = []
        for device, real, table in (("cpu", torch.float64, torch_ops), (case.device, kind, ops)):
            leaves = [x.to(kind).to(device, real, copy=True).requires_grad_() for x in given]
            with_angles = [
                x.to(device, torch.float64 if table is torch_ops else torch.float32) for x in turned
            ]
            out = run(table, *leaves, *(with_angles if "rope" in name else ()))
            out.square().sum().backward()
            far.append([out.detach(), *(x.grad for x in leaves)])
        bound = 1e-5 if kind is torch.float32 else 0.02
        off = max(float((a - b.double().cpu()).abs().max() / a.abs().max()) for a, b in zip(*far))
        found[name] = within(f"the relative difference of {name}", off, bound)
    return found


def vocabulary(case: Case) -> Numbers:
    """Log-probs, entropy, their gradient and samples over a vocabulary, against float64 on the CPU."""
    import torch

    from whet.models import kernels, torch_ops

    ops, draw, rows = kernels.load("auto"), torch.Generator().manual_seed(0), 8 if case.small else 64
    size = 5000 if case.small else 151936
    z = 3 * torch.randn(rows, size, generator=draw)
    z[:, 7] = -torch.inf
    targets, uniform = torch.arange(rows) * 61, torch.rand(rows, dtype=torch.float64, generator=draw)
    slopes = [torch.randn(rows, generator=draw) for _ in range(2)]
    exact, mine = (
        torch_ops.logprobs(z.double(), targets),
        ops.logprobs(z.to(case.device), targets.to(case.device)),
    )
    gradient, far = z.double().clone(), z.to(case.device, copy=True)
    torch_ops.logprobs_backward(gradient, targets, *exact, *(s.double() for s in slopes))
    ops.logprobs_backward(far, targets.to(case.device), *mine, *(s.to(case.device) for s in slopes))
    token, logp = ops.sample(z.to(case.device), uniform.to(case.device))
    cumulative = z.double().softmax(-1).cumsum(-1)
    at = token.cpu()[:, None]
    below = torch.where(at > 0, cumulative.gather(1, (at - 1).clamp(min=0)), 0.0).squeeze(1)
    miss = torch.maximum(below - uniform, uniform - cumulative.gather(1, at).squeeze(1)).clamp(min=0).max()
    many = torch.tensor([0.1, 0.0, 0.3, 0.6]).log().expand(4096, 4).contiguous().to(case.device)
    often = ops.sample(many, torch.rand(4096, dtype=torch.float64, generator=draw).to(case.device))[0].cpu()
    share = torch.bincount(often, minlength=4) / 4096
    if not torch.equal(ops.logprobs(z.to(case.device), token)[0], logp):
        raise Failed("a sampled token's log-prob has other bits than the trainer's")
    return {
        "logp": within("the difference of log-probs", float((mine[0].cpu() - exact[0]).abs().max()), 2e-5),
        "entropy": within("that of entropies", float((mine[1].cpu() - exact[1]).abs().max()), 2e-5),
        "gradient": within("that of gradients", float((far.cpu() - gradient).abs().max()), 1e-5),
        "beside_the_token": within("how far a number lies outside its token's share", float(miss), 1e-6),
        "of_0.1_0_0.3_0.6": [round(float(x), 3) for x in share],
    }


# ---------------------------------------------------------------- attention


def attention_over_pages(case: Case, *, dtype: str) -> Numbers:
    """Decode steps and prefills over the cache against the same in float64 on the CPU."""
    import torch

    from whet.models import kernels, paged

    needs_gpu(case, "reading pages in place")
    if (why := paged.lacks()) is not None:
        raise Failed(f"pages are not read in place: {why}")
    draw, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
    ops, worst = kernels.load("torch"), 0.0
    for heads, kv, size, window, cap, sunk in (
        (14, 2, 64, None, None, False),
        (12, 2, 128, 40, None, False),
        (8, 8, 96, None, 30.0, False),
        (16, 2, 64, 40, None, True),
    ):
        sinks = torch.randn(heads, generator=draw).to(kind) if sunk else None
        k = torch.randn(40, kv, size, 16, generator=draw).to(kind)
        v = torch.randn(40, kv, 16, size, generator=draw).to(kind)
        table, keys = torch.randperm(40, generator=draw).view(4, 10).int(), torch.tensor([1, 17, 150, 64])
        for queries in (None, torch.tensor([1, 17, 70, 3])):
            rows = 4 if queries is None else int(queries.sum())
            q = torch.randn(rows, heads, size, generator=draw).to(kind)
            how: Any = {"scale": size**-0.5, "window": window, "softcap": cap, "sinks": sinks}
            exact = ops.attend_cached(
                q.double(), k.double(), v.double(), table_BP=table, keys_B=keys, queries_B=queries, **how
            )
            how["sinks"] = None if sinks is None else sinks.to(case.device)
            far: list[Any] = [x.to(case.device) for x in (q, k, v)]
            place: dict[str, Any] = {"table_BP": table, "keys_B": keys} if queries is not None else {
                "table_BP": table.to(case.device), "keys_B": keys.to(case.device)
            }  # fmt: skip
            found = ops.attend_cached(far[0], far[1], far[2], **place, queries_B=queries, **how)
            worst = max(worst, float((found.double().cpu() - exact).abs().max()))
    return {
        "largest_difference": within("the largest difference", worst, 2e-5 if dtype == "float32" else 0.03)
    }


def packed_attention(case: Case) -> Numbers:
    """A packed batch with a shared prompt, forward and backward, with sinks and without, against float64 on the CPU."""
    import torch

    from whet.models import kernels
    from whet.models.segments import Segments

    kind = torch.bfloat16 if case.gpu else torch.float32
    segments = Segments(*torch.tensor([[0, 90, 0, 0], [90, 70, 0, 90], [160, 33, 0, 90], [193, 64, 0, 0]]).T)
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(257, n, 64, generator=draw).to(kind) for n in (8, 2, 2)]
    given.append(torch.randn(8, generator=draw).to(kind))
    ops, found, bound = kernels.load("torch"), {}, 0.03 if case.gpu else 1e-5
    for more, names in (
        ("", ("output", "dq", "dk", "dv")),
        (" with sinks", ("output", "dq", "dk", "dv", "dsinks")),
    ):
        seen: list[list[Any]] = []
        for device, dtype in (("cpu", torch.float64), (case.device, kind)):
            leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in given[: len(names) - 1]]
            q, k, v, *sinks = leaves
            how: Any = {"scale": 0.125, "window": None, "softcap": None, "sinks": sinks[0] if sinks else None}
            out = ops.attend_packed(q, k, v, segments, **how)
            out.square().sum().backward()
            seen.append([out.detach(), *(x.grad for x in leaves)])
        for name, a, b in zip(names, *seen):
            off = float((a - b.double().cpu()).abs().max() / a.abs().max())
            found[f"{name}{more}"] = within(f"the relative difference of {name}{more}", off, bound)
    return found
