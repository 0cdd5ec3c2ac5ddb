from tests.test_sizes import _Divides
from tests.sized import *
st=capture_sized(_Divides(), (torch.randn(4, 3),), dims=[(0,)])
print(st.traced.graph, [n.meta.get('val') for n in st.traced.graph.nodes])
print(st.joint.sizes, st.joint.module.graph)
a,b=symbolic("hf_llama",(3,24)),static("hf_llama",(5,17))
oa=[str(n.target) for n in a.traced.graph.nodes if n.op=='call_function' and not str(n.target).startswith('<')]; ob=[str(n.target) for n in b.traced.graph.nodes if n.op=='call_function'and not str(n.target).startswith('<')]
import difflib
print([x for x in difflib.unified_diff(oa,ob,n=1,lineterm='')])
