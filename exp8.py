import time, sys, torch, functools, pickle
from tests.sized import *
from tests.harness import *

from tests.models.gpt import *
from tests.models.zoo import drawn_once
from fxremat.passes.joint.sizes import *
from fxremat.passes.stages.resize import resize
from fxremat.costs.scaled import *
from tests.models import BENCH
which=sys.argv[1]
e=BENCH[which]
m=e.build(); a,k=e.sample(0)
from torch.utils._pytree import tree_leaves
ts=tensors_in((a,k)); print([t.shape for t in ts])
two= len(ts[0].shape)==2
dims=[(0,1) if two else (0,) for t in ts]
st=capture_sized(m,a,k,dims=dims)
sz=st.joint.sizes; print(sz)
def vals(fb,fl=1):
    out=[]
    for n,h,(p,d) in zip(sz.names,sz.hints,sz.sources):
        out.append(None)
    # by hint
    B=ts[0].shape[0]
    return tuple(max(2,int(h*(fb if h==B else fl))) for h in sz.hints)
t=time.perf_counter(); hint=st.measured.costs; print('measure hint',time.perf_counter()-t)
def measure(v):
    l=resize(st.line,v); t=time.perf_counter()
    c=measure_line(l,BlockCache(l),real={},cache=CostCache(),progress=silent).costs
    print('measured',v,'%.2f s'%(time.perf_counter()-t)); return c
A=lambda v: Anchor(v,measure(v))
h=Anchor(sz.hints,hint)
half=A(vals(.5)); 
sets={'hint':[h],'hint+halfB':[h,half]}
if two:
    halfL=A(vals(1,.5)); both=A(vals(.5,.5)); q=A(vals(.25,.5))
    sets|={'hint+halfL':[h,halfL],'hint+halfB+halfL':[h,half,halfL],'hint+bothhalf':[h,both], 'hint+quarter':[h,q]}
else:
    q=A(vals(.25)); sets|={'hint+q':[h,q]}
t=time.perf_counter(); sc={n:ScaledCosts.of(st.line,st.blocks,s) for n,s in sets.items()}; print('of',(time.perf_counter()-t)/len(sc))
print(sc['hint'].rates)
t=time.perf_counter(); sc['hint+halfB'].at(vals(.75)); print('at',time.perf_counter()-t)
t=time.perf_counter(); sc['hint+halfB'].at(vals(.75)); print('at',time.perf_counter()-t)
def tot(c): return sum(s.forward_s+s.backward_s for s in c.stages), sum(s.rebuild_s for s in c.stages), sum(x for _,x in c.again_s)
if __name__=="__main__":
  for v in ([vals(.75),vals(2),vals(.25), vals(1,.75),vals(1,.25),vals(2,.5),vals(1/4,1/4),vals(1,1/8)] if two else [vals(.75),vals(2),vals(.25),vals(1.5)]):
      truth=measure(v)
      tt=tot(truth)
      for n,s in sc.items():
          c=s.at(v); p=tot(c)
          wt={ (i,mo):x for i,mo,x in truth.workspace_bytes}
          small=[(str(tuple(st.joint.module.graph.nodes)[i].target),mo,x,wt[i,mo]) for i,mo,x in c.workspace_bytes if x<wt[i,mo]]
          over=sum(x for i,mo,x in c.workspace_bytes)/max(1,sum(wt.values()))
          err=[abs(x.backward_s/y.backward_s-1) for x,y in zip(c.stages,truth.stages) if y.backward_s>1e-4]
          print('  %-18s fwd+bwd %+.0f%% rebuild %+.0f%% ops %+.0f%%  worst bwd stage %.0f%%  ws too small %d over x%.2f'%(n,*(100*(x/y-1) for x,y in zip(p,tt)),100*max(err,default=0),len(small),over), small[:2], c.storage_bytes==truth.storage_bytes)
  