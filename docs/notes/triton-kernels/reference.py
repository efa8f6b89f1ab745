"""Float64 references: the recurrence token by token, and a chunked one for long sequences (both differentiable)."""

import torch


def recurrence(q, k, v, log_decay=None, b=None, w=None, e=None, state=None, cu=None, *, delta=True, scale=None):
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if cu is not None:
        bounds = cu.tolist()
        outs, finals = [], []
        for n, (i, j) in enumerate(zip(bounds, bounds[1:])):
            cut = lambda x: None if x is None else x if x.dim() == 1 else x[:, i:j]
            o, S = recurrence(cut(q), cut(k), cut(v), cut(log_decay), cut(b), cut(w), cut(e),
                              None if state is None else state[n : n + 1], delta=delta, scale=scale)
            outs.append(o), finals.append(S)
        return torch.cat(outs, 1), torch.cat(finals)
    f = lambda x: None if x is None else x.double()
    q, k, v, log_decay, b, w, e, state = map(f, (q, k, v, log_decay, b, w, e, state))
    g = HV // H
    q, k = q.repeat_interleave(g, 2), k.repeat_interleave(g, 2)
    e = k if e is None else e.repeat_interleave(g, 2)
    scale = K**-0.5 if scale is None else scale
    S = torch.zeros(B, HV, K, V, dtype=torch.float64, device=q.device) if state is None else state
    out = []
    for t in range(T):
        if log_decay is not None:
            S = S * (log_decay if log_decay.dim() == 1 else log_decay[:, t]).exp()[..., None, None]
        u = v[:, t] if w is None else w[:, t, :, None] * v[:, t]
        if delta:
            y = torch.einsum("bhkv,bhk->bhv", S, e[:, t])
            u = u - (y if b is None else b[:, t, :, None] * y)
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        out.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    o = torch.stack(out, 1) if out else v.new_zeros(B, 0, HV, V)
    return o, S


def chunked(q, k, v, log_decay=None, b=None, w=None, e=None, state=None, cu=None, *, delta=True, scale=None, C=64):
    """The same by chunks, in float64: quick on a GPU."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if cu is not None:
        bounds = cu.tolist()
        outs, finals = [], []
        for n, (i, j) in enumerate(zip(bounds, bounds[1:])):
            cut = lambda x: None if x is None else x if x.dim() == 1 else x[:, i:j]
            o, S = chunked(cut(q), cut(k), cut(v), cut(log_decay), cut(b), cut(w), cut(e),
                           None if state is None else state[n : n + 1], delta=delta, scale=scale, C=C)
            outs.append(o), finals.append(S)
        return torch.cat(outs, 1), torch.cat(finals)
    f = lambda x: None if x is None else x.double()
    q, k, v, log_decay, b, w, e, state = map(f, (q, k, v, log_decay, b, w, e, state))
    g = HV // H
    q, k = q.repeat_interleave(g, 2).transpose(1, 2), k.repeat_interleave(g, 2).transpose(1, 2)
    e = k if e is None else e.repeat_interleave(g, 2).transpose(1, 2)
    v = v.transpose(1, 2)
    one = torch.ones(B, HV, T, dtype=torch.float64, device=q.device)
    b = one if b is None else b.transpose(1, 2)
    w = one if w is None else w.transpose(1, 2)
    ld = 0 * one if log_decay is None else log_decay[None, :, None] * one if log_decay.dim() == 1 else log_decay.transpose(1, 2)
    scale = K**-0.5 if scale is None else scale
    S = torch.zeros(B, HV, K, V, dtype=torch.float64, device=q.device) if state is None else state
    out = []
    for t in range(0, T, C):
        s = slice(t, min(t + C, T))
        G = ld[:, :, s].cumsum(-1)
        n = G.shape[-1]
        low = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        D = (G[..., :, None] - G[..., None, :]).masked_fill(~low, 0).exp() * low
        kc, qc, ec = k[:, :, s], q[:, :, s], e[:, :, s]
        x = w[:, :, s, None] * v[:, :, s]
        if delta:
            A = b[:, :, s, None] * (ec @ kc.mT) * D * (~torch.eye(n, dtype=torch.bool, device=q.device))
            x = x - (b[:, :, s] * G.exp())[..., None] * (ec @ S)
            x = torch.linalg.solve_triangular(A + torch.eye(n, dtype=A.dtype, device=A.device), x, upper=False, unitriangular=True)
        out.append(scale * (G.exp()[..., None] * (qc @ S) + ((qc @ kc.mT) * D) @ x))
        S = G[..., -1].exp()[..., None, None] * S + (kc * (G[..., -1:] - G).exp()[..., None]).mT @ x
    o = torch.cat(out, 2).transpose(1, 2) if out else v.new_zeros(B, 0, HV, V)
    return o, S


def gradients(x, *, delta=True, C=64, seed=7):
    """Float64 gradients of a random linear functional of o and the final state, for every float input."""
    leaf = {n: t.detach().double().requires_grad_() if t.is_floating_point() else t for n, t in x.items()}
    o, final = chunked(**leaf, delta=delta, C=C)
    gen = torch.Generator(device=o.device).manual_seed(seed)
    do = torch.randn(o.shape, generator=gen, device=o.device).to(x["v"].dtype)
    dfinal = torch.randn(final.shape, generator=gen, device=o.device)
    names = [n for n, t in leaf.items() if t.is_floating_point()]
    grads = torch.autograd.grad((o * do).sum() + (final * dfinal).sum(), [leaf[n] for n in names])
    return dict(o=o.detach(), final=final.detach(), do=do, dfinal=dfinal, grads=dict(zip(names, grads)))


def inputs(B, T, H, HV, K, V, *, dtype=torch.float32, device="cpu", seed=0, decay="head", delta=True, own=False,
           strengths=True, with_state=False, lengths=None, hard=False):  # fmt: skip
    """Random inputs: unit keys, beta in (0, 1), decays about -0.05; `hard`: near-parallel keys, beta near 1, wild decays."""
    gen = torch.Generator(device=device).manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=gen, device=device)
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1)
    q, k, e = (unit(r(B, T, H, K)) for _ in range(3))
    if hard:
        k = unit(unit(r(B, 1, H, K)) + 0.05 * unit(k))
    out = dict(q=q.to(dtype), k=k.to(dtype), v=r(B, T, HV, V).to(dtype))
    if decay == "head":
        out["log_decay"] = -torch.nn.functional.softplus(r(B, T, HV) - 3)
        if hard:
            u = torch.rand(B, T, HV, generator=gen, device=device)
            out["log_decay"] = torch.where(u < 0.02, -60.0, torch.where(u < 0.05, -20.0, torch.where(u < 0.8, 0.0, -0.1)))
    if decay == "fixed":
        out["log_decay"] = -torch.rand(HV, generator=gen, device=device) * 0.1
    if strengths:
        out["w"] = (0.99 + 0.01 * r(B, T, HV).sigmoid()) if hard else r(B, T, HV).sigmoid()
        if delta:
            out["b"] = out["w"]
    if own:
        out["e"] = unit(k.float() + 0.3 * e).to(dtype)
    N = B if lengths is None else len(lengths)
    if with_state:
        out["state"] = r(N, HV, K, V)
    if lengths is not None:
        out["cu"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return out


def rms(x, ref):
    x, ref = x.double(), ref.double()
    return float((x - ref).square().mean().sqrt() / ref.square().mean().sqrt().clamp_min(1e-30))
