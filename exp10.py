from tests.sized import *
from fxremat.passes.joint.sizes import *
from fxremat.passes.joint.storage import build_storage_table
from tests.test_sizes import HINTS, OTHERS
from collections import Counter
for name in ("gpt","unet","resnet50"):
    for sizes in OTHERS[name]:
        step, alone = symbolic(name, HINTS[name]), static(name, sizes)
        values = AtSize.of(step, alone).values
        s,z=settle(step.traced)
        t=build_storage_table(s.graph); u=build_storage_table(alone.traced.graph)
        a=z.formulas(t.asked_bytes)(values).tolist(); b=list(u.nbytes)
        print(name,sizes,len(a),len(b),a==b)
        if a!=b:
            ca,cb=Counter(a),Counter(b); print(ca-cb, cb-ca)
            oa=[str(n.target) for n in s.graph.nodes if n.op=='call_function']; ob=[str(n.target) for n in alone.traced.graph.nodes if n.op=='call_function']
            print(len(oa),len(ob),oa==ob)
            bad=[(t.owner[i].name,u.owner[i].name,str(t.owner[i].target),a[i],b[i],repr(t.asked_bytes[i]),tuple(u.owner[i].meta['val'].shape),u.owner[i].meta['val'].stride()) for i in range(min(len(a),len(b))) if a[i]!=b[i]]
            print(bad[:3])
        print(len(step.joint.storages.nbytes),len(alone.joint.storages.nbytes))
