import time, sys, torch, functools, pickle
from tests.sized import *
from tests.harness import *
from tests.models.gpt import *
from tests.models.zoo import drawn_once
from fxremat.passes.joint.sizes import *
from fxremat.passes.stages.resize import resize
from fxremat.planner.search import Search
cfg=GPTConfig()
m=drawn_once(lambda: GPT(cfg))()
def s(b,l): return tokens(1,vocabulary=512,batch=b,length=l)
B,L=4,512
st=capture_sized(m,s(B,L),dims=[(0,1),(0,1)])
t=time.perf_counter(); st.measured; print('measure',time.perf_counter()-t)
t=time.perf_counter(); se=searched(st); print('search',time.perf_counter()-t, len(se.pool.members), [len(a.members) for a in se.alone], se.evaluator.count)
t=time.perf_counter(); 
for c in se.pool.members: se.evaluator.candidate(c.codes,c.held)
print('eval each',(time.perf_counter()-t)/len(se.pool.members))
l2=resize(st.line,(2,384,2,384))
ms=measure_line(l2, BlockCache(l2), real={}, cache=CostCache(), progress=silent)
A=ms.costs
t=time.perf_counter();ma=st.measured.at(A); print('measured.at',time.perf_counter()-t)
sur=bare(l2.joint)
t=time.perf_counter();ev2=se.evaluator.at(ma, sur); print('ev.at',time.perf_counter()-t)
t=time.perf_counter();ev2.step; print('load',time.perf_counter()-t, ev2.step.data[ev2.step.at.counts+2])
t=time.perf_counter(); 
new=[ev2.candidate(c.codes,c.held) for c in se.pool.members]
print('eval each new',(time.perf_counter()-t)/len(se.pool.members))
t=time.perf_counter(); 
new=[ev2.candidate(c.codes,c.held) for c in se.pool.members]
print('eval each new again',(time.perf_counter()-t)/len(se.pool.members))
for c in (new[0],new[len(new)//3]):
    t=time.perf_counter(); k=ev2.count; r=ev2.climb(c); print('climb',time.perf_counter()-t,len(r),ev2.count-k)
pk=[c.peak_bytes for c in new]; ss=[c.total_s for c in new]
print('inversions', sum(a>b for a,b in zip(pk,pk[1:])), sum(a<b for a,b in zip(ss,ss[1:])), len(new))
t=time.perf_counter(); full=Search.over(ms,BlockCache(l2),sur,progress=silent); print('full search',time.perf_counter()-t)
best=0
from bisect import bisect_right
for share in (0,0.02,.05,.1,.2,.3,.4,.5,.6,.7,.8,.9):
    lo,hi=full.pool.members[0].peak_bytes, full.baseline.peak_bytes
    b=int(lo+(hi-lo)*share)
    f=full.fastest_within(b)
    mine=[c for c in new if c.peak_bytes<=b]
    if mine:
        x=min(mine,key=lambda c:c.total_s)
        print(share, 'full %.4f pool %.4f base %.4f'%(f.total_s,x.total_s,full.baseline.total_s))
    else: print(share,'none', min(pk), b)
