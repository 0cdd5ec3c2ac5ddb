import time, sys, torch, functools
from tests.sized import *
from tests.harness import *
from tests.models.gpt import *
from tests.models.zoo import drawn_once
from fxremat.passes.joint.sizes import *
from fxremat.passes.stages.resize import resize
cfg=GPTConfig(vocabulary=96,context=64,width=64,blocks=3,dropout=0.1, returns_logits=True) if len(sys.argv)<2 else GPTConfig(dropout=0.1)
v=cfg.vocabulary
m=drawn_once(lambda: GPT(cfg))()
def s(b,l): return tokens(1,vocabulary=v,batch=b,length=l)
st=capture_sized(m,s(4,48),dims=[(0,1),(0,1)])
line=st.line
t=time.perf_counter(); l2=resize(line,(2,32,2,32)); print('resize',time.perf_counter()-t, len(st.joint.module.graph.nodes))
static=capture(m,s(2,32))
a=l2.joint.storages.nbytes; b=static.joint.storages.nbytes
print(len(a),len(b), sorted(a)==sorted(b), a==b)
f=st.joint.sizes.formulas(st.joint.storages.asked_bytes)
print(tuple(f((2,32,2,32)).tolist())==a)
ops=lambda j:[str(n.target) for n in (*j.forward,*j.backward)]
print(ops(static.joint)==ops(st.joint), len(ops(static.joint)),len(ops(st.joint)))
ms=measure_line(l2, BlockCache(l2), real={}, cache=CostCache(), progress=silent)
st.measured, static.measured
w=lambda c:[(i,m,n) for i,m,n in c.workspace_bytes if n]
A=ms.costs; B=static.measured.costs
print(sorted(n for _,_,n in w(A))==sorted(n for _,_,n in w(B)))
t=time.perf_counter();ma=st.measured.at(A); print('measured.at',time.perf_counter()-t)
ev=st.evaluator(); 
t=time.perf_counter();ev2=ev.at(ma, bare(l2.joint)); print('ev.at',time.perf_counter()-t)
from fxremat.planner.evaluator import Evaluator
ref=Evaluator.of(ms,BlockCache(l2),find_options(ms,BlockCache(l2)),bare(l2.joint))
from fxremat.ir.coded import coded
n=len(line.stages)
for seed in range(20):
    c=coded(random_schedule(n,seed))
    x,y,z=ev.candidate(c),ev2.candidate(c),ref.candidate(c)
    assert y.peak_bytes==z.peak_bytes and abs(y.total_s-z.total_s)<1e-9, (y,z)
    assert ev.candidate(c).peak_bytes==x.peak_bytes and ev.candidate(c).total_s==x.total_s
print(x.peak_bytes,y.peak_bytes,z.peak_bytes)
