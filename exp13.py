import gc,time
from benchmarks.sizes import *
f=Family.of("gpt16")
t0=[0]; tot=[0,0]
def cb(ph,info):
    if ph=='start': t0[0]=time.perf_counter()
    else:
        d=time.perf_counter()-t0[0]; tot[0]+=d; tot[1]+=1
        if d>0.02: print('gc gen',info['generation'],'%.0f ms'%(1e3*d))
gc.callbacks.append(cb)
h=f.step.joint.sizes.hints
f.planned(h,Clock())
ws=[]
for k in range(12):
    tot[:]=[0,0]
    c=Clock(); f.planned((max(2,4-k%3),512-16*k)*2,c)
    w=sum(c.parts.values()); ws.append(w)
    print('%.1f ms'%w,'gc %.1f ms %d'%(1e3*tot[0],tot[1]),{k:round(v,1) for k,v in c.parts.items()})
print(sorted(ws)[6])
import cProfile,pstats
p=cProfile.Profile(); p.enable()
for k in range(5): f.planned((3,500-16*k)*2,Clock())
p.disable(); pstats.Stats(p).sort_stats('tottime').print_stats(25)
