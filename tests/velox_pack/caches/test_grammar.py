from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from velox_pack.caches import grammar, recipes
from velox_pack.manifests.errors import RecipeError


@dataclass(frozen=True)
class Example:
    about: ClassVar[str] = "for tests"
    count: int = 4
    bits: float = 3.0
    extra: float | None = None
    axis: str = "token"


def refused(function, *arguments):
    with pytest.raises(RecipeError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_parts():
    assert grammar.parse(" a : x = 1 , y=b + c") == [
        grammar.Part("a", (("x", "1"), ("y", "b"))),
        grammar.Part("c", ()),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "+",
        "a+",
        "+a",
        ":x=1",
        "a:",
        "a:,",
        "a:x=1,",
        "a:,x=1",
        "a:x=1,,y=2",
        "a:x",
        "a:x=",
        "a:=1",
    ],
)
def test_broken_text_is_refused(text):
    assert repr(text) in refused(grammar.parse, text)


def test_an_option_given_twice():
    assert "x is given twice" in refused(grammar.parse, "a:x=1,x=1")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("count", "1.5"), "example: count=1.5 is not int"),
        (("count", "many"), "example: count=many is not int"),
        (("bits", "x"), "example: bits=x is not float"),
        (("extra", "none"), "example: extra=none is not float"),
    ],
)
def test_wrong_types(option, said):
    assert refused(grammar.make, Example, "example", (option,)) == said


def test_unknown_options_list_the_valid_ones():
    message = refused(grammar.make, Example, "example", (("axes", "token"),))
    assert message == "example has no option axes; it takes count, bits, extra, axis"


@given(
    st.builds(
        Example,
        count=st.integers(),
        bits=st.floats(0, 1e6),
        extra=st.none() | st.floats(-1e6, 1e6),
        axis=st.sampled_from(["token", "channel"]),
    )
)
def test_written_and_read_again_it_is_the_same(example):
    text = grammar.write("example", example)
    (part,) = grammar.parse(text)
    assert grammar.make(Example, part.name, part.options) == example
    assert grammar.write("example", example) == text


@given(st.text(max_size=40))
def test_any_text_is_a_plan_or_one_line(text):
    message = ""
    try:
        plan = recipes.parse(text)
    except RecipeError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1
    if not message:
        assert recipes.parse(plan.canonical) == plan


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10**5,
        "spectral:" + "x" * 10**5,
        "spectral:" + "x" * 10**5 + "=1",
        "spectral:bits=" + "9" * 10**5 + "x",
        "spectral:window=" + "9" * 10**5,
        "spectral:bits=3" + ",bits=3" * 10**4,
        "affine+" * 10**4 + "affine",
        "+" * 10**5,
        "ratequant+" * 10**4 + "spectral",
        "ratequant+affine:sinks=" + "0" * 4000 + "4",
    ],
    ids=lambda text: text[:20],
)
def test_a_recipe_without_end_is_not_repeated_whole(text):
    assert len(refused(recipes.parse, text)) < 600
