"""Words to avoid, and what to write in their place."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A word, or a use of a word, that the prose linter flags.

    Attributes:
        word: as a person looks it up.
        instead: what to write.
        why: a short reason.
        pattern: a regular expression, matched without regard to case.
        flagged: sentences in which the linter flags the word.
        allowed: sentences with the same letters that it lets through.
    """

    word: str
    instead: str
    why: str
    pattern: str
    flagged: tuple[str, ...]
    allowed: tuple[str, ...] = ()


_ENDS = (
    r"(?=\s*(?:[.,;:)]|¶|\Z|\s(?:is|are|was|were|has|have|in|by|for|of|and|or|that|which|to)\b))"
)
"""What follows a noun, so that the word before it is one."""

_OWNERS = r"(?:its|their|his|her|your|our|my|whose|one's|\w+'s|\w+s')"

_NO_NOUN = (
    r"(?=\s*(?:[.,;:)]|¶|\Z|\s(?:in|for|of|with|to|and|or|that|which|where|when|is|are|was|were|from"
    r"|by|at|on|as|if|than|but|before|after|because|has|have|only|again|too|also)\b))"
)

_STARTS = r"(?:\A|(?<=[.!?]\s)|(?<=\n¶\n))"
"""Where a sentence starts."""

_BE = r"(?:is|are|was|were|be|been|being)"

VOCABULARY = (
    Entry(
        "told, tell, tells",
        "say, show, report; specify, give; distinguish",
        "A program reports or shows, and a user specifies.",
        r"\b(?:told|tells?|telling)\b",
        (
            "What nobody told is measured.",
            "The trace tells where the time goes.",
            "It cannot tell the two apart.",
        ),
        ("What you did not specify is measured.",),
    ),
    Entry(
        "the found, the known, the seen",
        "the result, the cached value, the measured value",
        "A participle is no noun: name the thing.",
        rf"\b(?:a|an|the|each|every|its|their|all|any|no)\s+(?:found|known|seen)\b{_ENDS}",
        ("Return the found.", "It reads the known of a step.", "Each seen is counted once."),
        ("The known sizes are reused.", "The plan was found in the cache."),
    ),
    Entry(
        "beside",
        "also allocated, held at the same time; next to; besides",
        "It is about places. Say what is allocated when.",
        r"\bbeside\b",
        ("What is allocated beside the step counts too.",),
        ("Besides the step, the optimizer allocates memory.",),
    ),
    Entry(
        "there (a place)",
        "held, live, allocated, present, in use",
        "A storage is held or live; no place was named.",
        rf"\b(?:{_BE}|stays?|remains?|kept|lies|lie)\s+there\b"
        r"(?!\s+(?:an?|any|no|more|other|enough|still)\b)",
        ("Count what is there.", "Gradients that are there are counted."),
        ("There is a limit.", "Is there a limit?", "If there are gradients, they are counted."),
    ),
    Entry(
        "around (a noun)",
        "external, held by the training loop, outside the model",
        "Say who holds it.",
        rf"\b(?:{_BE}|lies?|the|its|their)\s+around\b(?!\s+(?:[\d~]|a|an|one|half|the)\b)",
        ("Count what is around.", "The around of a step is measured."),
        ("It is around 5 MiB.", "The loop around the model holds it."),
    ),
    Entry(
        "alone",
        "only, by itself, without",
        "After a noun it can be read in two ways.",
        r"(?<![\w-])alone\b",
        ("From these alone a plan is made.", "A graph alone is planned."),
        ("Only these are used.", "A stand-alone program."),
    ),
    Entry(
        "of its own",
        "a separate, its own and a noun",
        "A noun must follow 'own'.",
        rf"\b(?:{_OWNERS}\s+own\b{_NO_NOUN}|(?:the|an?)\s+own\b)",
        ("It has a folder of its own.", "A loop of the user's own is counted.", "It is the own."),
        ("It has its own folder.", "The model's own class is kept.", "They own the state."),
    ),
    Entry(
        "apart",
        "separate, separately, distinguish",
        "Say which are separate.",
        r"\bapart\b(?!\s+from\b)",
        ("These are counted apart.", "They are a nanosecond apart."),
        ("Apart from that, nothing changes.",),
    ),
    Entry(
        "settle",
        "fix, resolve, freeze, choose",
        "Say which of these it is.",
        r"\bsettl(?:e|es|ed|ing)\b",
        ("The budget is settled in the third step.", "Steps settle."),
        ("The budget is resolved in the third step.",),
    ),
    Entry(
        "turn (a noun)",
        "loss point",
        "The term is 'loss point': the moment between forward and backward.",
        r"\b(?:the|an?|this|that|each|every|its|their|whose|at|one)\s+turns?\b(?!-)",
        ("Memory at the turn is measured.", "Each turn is a call."),
        ("It turns that off.", "Each, in turn, is measured.", "This turned out well."),
    ),
    Entry(
        "words (of a model)",
        "vocabulary of",
        "The term is 'vocabulary', or 'tokens'.",
        r"\b(?:\d{1,3}(?:[ ,]\d{3})+|\d{4,}|\d+[Kk]|thousand)\s+words\b"
        r"|\bwords\s+of\s+(?:an?|the|its)\s+(?:language\s+)?(?:model|vocabulary)\b",
        ("A GPT of 32 000 words.", "It has the words of a model."),
        (
            "A vocabulary of 32 000.",
            "A sentence has at most 30 words.",
            "In words of one syllable.",
        ),
    ),
    Entry(
        "mend",
        "fix, repair",
        "Software is fixed.",
        r"\bmend(?:s|ed|ing)?\b",
        ("The fault is mended.",),
        ("This amends the plan.", "It is recommended."),
    ),
    Entry(
        "anew",
        "again",
        "The plain word is shorter to read.",
        r"\banew\b",
        ("It is measured anew.",),
        ("A new plan is made.",),
    ),
    Entry(
        "likewise",
        "also, the same way",
        "The plain word is shorter to read.",
        r"\blikewise\b",
        ("The backward likewise.",),
        ("The backward does the same.",),
    ),
    Entry(
        "very",
        "exact, same; or leave it out",
        "It says nothing about how much.",
        r"\bvery\b",
        ("It is planned at the very sizes.", "A very large model."),
        ("Every model is planned.",),
    ),
    Entry(
        "Of a ... (a fragment)",
        "a clause with a subject and a verb",
        "A sentence needs a subject.",
        _STARTS + r"(?-i:Of)\s+(?:an?|the|each|every|what|its|this|that|all)\b[^,.:;]*\.",
        ("Of a call.", "It is counted. Of the calls that wait."),
        ("The arguments of a call.", "Of the scripts, 16 ran.", "Of 25 scripts, 16 ran."),
    ),
    Entry(
        "Both. (a fragment)",
        "a clause with a subject and a verb",
        "One word is no sentence.",
        _STARTS + r"(?-i:(?!(?:Xx|Eq|Fig|Sec|Tab|No)\.)[A-Z][a-z]+\.(?=\s|\Z)(?!\s+[a-z]))",
        ("Both.", "It is counted. Back. It is freed."),
        ("Both are counted.", "See Fig. 3 for both.", "It calls `f`. Then it returns."),
    ),
    Entry(
        "British spelling",
        "behavior, color, favor, neighbor, center, gray, optimize, labeled, modeled",
        "The project writes American English.",
        r"\b(?:(?:behavi|col|fav|neighb|hon)our\w*|centre[sd]?|grey|(?:optim|initial|normal|real"
        r"|general|serial|synchron|util|minim|maxim|quant|recogn|summar)is(?:e[sdr]?|ing|ation)"
        r"|analys(?:ed?|ing)|(?:label|model|cancel|travel)l(?:ed|ing)|artefacts?|licence)\b",
        ("Its behaviour is optimised.", "A labelled axis."),
        ("Its behavior is optimized.", "An analysis.", "The analyses agree."),
    ),
)
