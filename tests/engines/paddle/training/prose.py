"""Prose: short plain stories, of which there is no end, for training and for measuring.

A story keeps to its person, place and thing. Stories that were held out pair a person with a place that no story for
training does.
"""

import random
from collections.abc import Iterator

from tokenbus.engines.paddle.tokenizer import END, ByteTokenizer

_PERSONS = "Anna Ben Clara David Elsa Frank Greta Henry Ida John Karen Leo Maria Nora Oscar Paul".split()  # noqa: SIM905
_PLACES = (  # noqa: SIM905 - a list takes a line for each
    "the harbour; the market; the old mill; the railway station; the library; the garden; the bakery"
    "; the lighthouse; the workshop; the school; the bridge; the forest"
).split("; ")
_THINGS = (  # noqa: SIM905 - as above
    "a small brass key; a letter without a name; an old clock; a box of tools; a map of the river"
    "; a red umbrella; a basket of apples; a broken lamp; a book of stories; a grey coat; a silver coin"
    "; a bundle of rope"
).split("; ")
_TIMES = ("morning", "evening", "afternoon", "day in spring", "day in winter", "night")
_SKIES = ("It was raining.", "It was cold.", "The sun was shining.", "The wind was strong.", "There was some fog.")
_OPENINGS = (
    "One {time} {person} went to {place}. {sky}",
    "{sky} That {time} {person} was at {place} again.",
    "{person} lived near {place} for many years. {sky}",
)
_FINDS = (
    "On the ground near {place}, {person} found {thing}.",
    "Somebody had left {thing} at {place}, and nobody knew why.",
    "A stranger came and gave {person} {thing}.",
)
_TALKS = (
    '"Is this yours?" asked {person}. "No," said {friend}, "I have never seen it before."',
    '"Where does it come from?" asked {friend}. "I do not know," said {person}.',
    '"What will you do with it?" asked {friend}. "I will keep it until somebody asks for it," said {person}.',
    '"You should take it home," said {friend}. "Not today," said {person}.',
)
_MIDDLES = (
    "{person} thought about it for a long time.",
    "Then {person} and {friend} walked back to {place} together.",
    "Nobody at {place} said a word.",
    "{friend} looked at it, and then at {person}, and smiled.",
    "They waited until it was dark, but nobody came.",
)
_ENDINGS = (
    "In the end {person} left it at {place}, where everybody could see it.",
    "The next {time} it was gone, and {person} never saw it again.",
    "{person} still has it, and {friend} still asks about it.",
    "And that was the end of it.",
)


def story(chance: random.Random, *, held_out: bool) -> str:
    while True:
        person, place = chance.randrange(len(_PERSONS)), chance.randrange(len(_PLACES))
        if ((person + 2 * place) % 5 == 0) is held_out:
            break
    friends = [name for name in _PERSONS if name != _PERSONS[person]]
    names = {
        "person": _PERSONS[person], "friend": chance.choice(friends), "place": _PLACES[place],
        "thing": chance.choice(_THINGS), "time": chance.choice(_TIMES), "sky": chance.choice(_SKIES),
    }  # fmt: skip
    parts = [
        chance.choice(_OPENINGS),
        chance.choice(_FINDS),
        *chance.sample(_TALKS, chance.randint(1, 3)),
        *chance.sample(_MIDDLES, chance.randint(1, 3)),
        chance.choice(_ENDINGS),
    ]
    return " ".join(parts).format(**names)


def stories(seed: int, *, held_out: bool) -> Iterator[str]:
    """Return stories without end: the same ones for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - repeatable, and no secret
    while True:
        yield story(chance, held_out=held_out)


def tokens_of(text: str) -> list[int]:
    return [*ByteTokenizer().encode(text), END]
