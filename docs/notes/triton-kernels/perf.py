"""Times of the triton backend through autograd, with CUDA graphs and without."""
import statistics, sys, time
import torch
from deltazoo import UpdateSpec, UpdateInputs, bind
from deltazoo.backends.triton import TritonBackend
DEV="cuda"
SHAPES = {
    "8x4096p 16/16": (1, 32768, 16, 16, [4096] * 8),
    "8x4096 16/16": (8, 4096, 16, 16, None),
    "4x8192p 16/64": (1, 32768, 16, 64, [8192] * 4),
    "1x8192 16/32": (1, 8192, 16, 32, None),
    "1x32768 2/8": (1, 32768, 2, 8, None),
}
def bench(fn, n=25, graph=True):
    for _ in range(3): fn()
    torch.cuda.synchronize()
    if graph:
        g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): fn()
        fn=g.replay
    cache=torch.empty(64*2**20,dtype=torch.int32,device=DEV)
    ts=[]
    for _ in range(n):
        cache.zero_(); a,b=torch.cuda.Event(True),torch.cuda.Event(True)
        a.record(); fn(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b))
    return statistics.median(ts)
def inputs(spec,B,T,H,HV,lengths,K=128,V=128,grad=False,dt=torch.bfloat16):
    g=torch.Generator(DEV).manual_seed(0); r=lambda *s: torch.randn(*s,generator=g,device=DEV)
    unit=lambda x: torch.nn.functional.normalize(x,dim=-1)
    x=dict(q=unit(r(B,T,H,K)).to(dt),k=unit(r(B,T,H,K)).to(dt),v=r(B,T,HV,V).to(dt))
    if spec.decay=="head": x["log_decay"]=torch.nn.functional.logsigmoid(r(B,T,HV)+3) if True else None
    if spec.decay=="fixed": x["log_decay"]=-torch.rand(HV,generator=g,device=DEV)*.1
    if spec.beta=="head": x["beta"]=r(B,T,HV).sigmoid()
    if lengths: x["cu_seqlens"]=torch.tensor([0,*torch.tensor(lengths).cumsum(0).tolist()],dtype=torch.int32,device=DEV)
    if grad: x={n:(t.requires_grad_() if t.is_floating_point() else t) for n,t in x.items()}
    return UpdateInputs(**x)
def both(b,x,do):
    fl=[t for t in x if t is not None and t.requires_grad]
    def fn():
        o=b(x).o
        return torch.autograd.grad(o,fl,do)
    return fn
if __name__=="__main__":
    t0=time.time()
    gdn=UpdateSpec(decay="head",beta="head")
    b=bind(gdn,TritonBackend())
    for n,(B,T,H,HV,L) in SHAPES.items():
        if len(sys.argv)>1 and not any(n.startswith(a) for a in sys.argv[1:]): continue
        x=inputs(gdn,B,T,H,HV,L); f=bench(lambda: b(x)); fe=bench(lambda: b(x),graph=False)
        xg=inputs(gdn,B,T,H,HV,L,grad=True); do=torch.randn_like(xg.v); fn=both(b,xg,do)
        fb=bench(fn); fbe=bench(fn,graph=False)
        torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); base=torch.cuda.memory_allocated()
        o=b(xg).o; gr=torch.autograd.grad(o,[t for t in xg if t is not None and t.requires_grad],do); torch.cuda.synchronize()
        peak=(torch.cuda.max_memory_allocated()-base)/2**20
        print(f"{n:15s} fwd graph {f:.3f} eager {fe:.3f}; both graph {fb:.3f} eager {fbe:.3f}; peak {peak:.0f} MiB  [{time.time()-t0:.0f} s]",flush=True)
        del o,gr
    for name,spec in {} if len(sys.argv)>1 and "specs" not in sys.argv else {"delta":UpdateSpec(beta="head"),"additive":UpdateSpec(decay="head",transition="additive"),"retnet":UpdateSpec(decay="fixed",transition="additive")}.items():
        b=bind(spec,TritonBackend()); x=inputs(spec,8,4096,16,16,None); f=bench(lambda: b(x)); xg=inputs(spec,8,4096,16,16,None,grad=True); fb=bench(both(b,xg,torch.randn_like(xg.v)))
        print(f"{name} fwd {f:.3f} both {fb:.3f} [{time.time()-t0:.0f} s]",flush=True)
