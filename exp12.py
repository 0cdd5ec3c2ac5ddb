import time, cProfile, pstats
from benchmarks.sizes import *
f=Family.of("llama16")
c=Clock(); h=f.step.joint.sizes.hints
f.planned(h,c)
s=f.search
cands=[s.fastest_within(int(s.least_bytes+(s.baseline.peak_bytes-s.least_bytes)*x)) for x in (.5,.45,.4,.3,.2)]
for cand in cands:
    p=s.evaluator.program(cand); pk=s.evaluator.evaluation(cand).peaks_bytes
    n=len(f.modules.modules)
    t=time.perf_counter(); g=rewrite(p,pk,f.modules); d=time.perf_counter()-t
    t=time.perf_counter(); g=rewrite(p,pk,f.modules); d2=time.perf_counter()-t
    print(len(p.calls),'new blocks',len(f.modules.modules)-n,'%.1f ms, again %.1f ms'%(1e3*d,1e3*d2))
pr=cProfile.Profile(); pr.enable()
for _ in range(5): rewrite(p,pk,f.modules)
pr.disable(); pstats.Stats(pr).sort_stats('cumulative').print_stats(45)
