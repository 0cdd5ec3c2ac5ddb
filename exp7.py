from exp6 import *
from fxremat.planner.resized import *
print('-----')
for share in (0,0.02,.05,.1,.2,.3,.4,.5,.6,.7,.8,.9,1):
    lo,hi=full.pool.members[0].peak_bytes, full.baseline.peak_bytes
    b=int(lo+(hi-lo)*share)
    f=full.fastest_within(b)
    t=time.perf_counter(); x=search_at(se,A,sur,budget_bytes=b); d=time.perf_counter()-t
    if x.least_bytes<=b: print(share, 'full %.4f mine %.4f'%(f.total_s,x.fastest_within(b).total_s), 'took %.1f ms'%(1e3*d), len(x.pool.members))
    else: print(share,'none', x.least_bytes, b, 'took %.1f ms'%(1e3*d))
t=time.perf_counter(); least_bytes_at(se,A,sur); print('least',time.perf_counter()-t)
