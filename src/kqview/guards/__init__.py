"""Guards: what attention says about a request, from the heads of a head file or from all heads.

- `rerank`: which documents answer a query
- `injection_score`: whether data contain orders that the model would follow
- `cite`: which source each sentence of an answer is from
- `grounding`: whether each sentence of an answer is said by its sources
- `best_grounded`: a text of which each sentence is the best grounded of several
- `StopOnInjection`, `TakeBackUngrounded`: mods that act on the second and on the fourth
- `AlignAttByHeads`: the mod AlignAtt with the heads of a file

All but the last capture sums over spans and nothing else; that one captures the rows of its heads.
The measures are in `kqview.heads.measures`.
"""

from kqview.guards.branches import best_grounded as best_grounded
from kqview.guards.mods import (
    AlignAttByHeads as AlignAttByHeads,
    StopOnInjection as StopOnInjection,
    TakeBackUngrounded as TakeBackUngrounded,
)
from kqview.guards.scores import (
    Citation as Citation,
    GroundedSentence as GroundedSentence,
    InjectionScore as InjectionScore,
    cite as cite,
    grounding as grounding,
    injection_score as injection_score,
    rerank as rerank,
)
from kqview.heads.measures import (
    Prompt as Prompt,
    instruction_prompt as instruction_prompt,
    source_prompt as source_prompt,
)
