from exp8 import *
from fxremat.costs.library import *
for v in (vals(2),vals(1.5),vals(.25)):
    truth=measure(v)
    t=time.perf_counter(); base=sc['hint'].at(v); c=with_convolutions(base,st.line,v,CostCache()); d=time.perf_counter()-t
    wt={ (i,mo):x for i,mo,x in truth.workspace_bytes}
    small=[(str(tuple(st.joint.module.graph.nodes)[i].target),mo,x,wt[i,mo]) for i,mo,x in c.workspace_bytes if x<wt[i,mo]]
    print(v,'took %.2f s'%d,'too small',small[:3],'over',sum(x for i,mo,x in c.workspace_bytes)/max(1,sum(wt.values())))
