"""Chip profiles: what is there has a source, what is not is borrowed and says so."""

import pytest

from cetane.errors import CetaneError
from cetane.hardware.chips import chip_of, find_chip, load_chips, parse_chips

RECORD = 'stream = [{ value = 60.0, source = "a paper", date = "2026" }]'


def test_the_shipped_chips() -> None:
    chips = load_chips()
    assert {"m1", "m1-max", "m4", "m4-pro", "m4-max", "a19-pro"} <= set(chips)
    for chip in chips.values():
        for quantity in ("stream", "compute", "program_bytes", "programs", "states", "notch"):
            figure = chip.figure(quantity)
            assert figure.value > 0 and figure.source and figure.date
            assert "; " not in figure.source  # it stands between the parts of a reason
    assert chips["m4-max"].figure("stream").value == 118.9


def test_what_is_missing_is_borrowed_and_says_of_whom() -> None:
    own = find_chip("m1-pro").figure("stream")
    assert (own.value, own.of) == (54.9, "")
    borrowed = find_chip("m1-pro").figure("dispatch")
    assert (borrowed.value, borrowed.of) == (0.23, "m1")
    assert find_chip("m1-pro").figure("states").of == "m4-max"


def test_devices() -> None:
    chip = chip_of("iPhone 17 Pro (A19 Pro), iOS 26")
    assert chip is not None and chip.id == "a19-pro"
    assert chip_of("MacBook Air (M-class)") is None


def test_an_unknown_chip_names_the_known() -> None:
    with pytest.raises(CetaneError, match=r"no chip 'm4-mx'; did you mean 'm4-max'\? known: m1"):
        find_chip("m4-mx")


@pytest.mark.parametrize("name", ["a11", "a12", "m4-ultra", "m9"])
def test_a_chip_without_figures_is_no_other_generation(name: str) -> None:
    with pytest.raises(CetaneError) as error:
        find_chip(name)
    assert error.value.message.startswith(f"no chip {name!r}; known: m1")
    assert error.value.hint is None


def test_a_guess_keeps_the_generation() -> None:
    with pytest.raises(CetaneError, match=r"did you mean 'a18-pro'\?"):
        find_chip("a18pro")


@pytest.mark.parametrize(
    ("product", "chip"),
    [
        ("iPhone 15 Pro", "a17-pro"),
        ("iphone 15", "a16"),
        ("iphone17", "a19"),
        ("iPhone16Pro", "a18-pro"),
        ("iPad mini (A17 Pro)", "a17-pro"),
        ("iPad Air (5th generation)", "m1"),
        ("iPad Pro 12.9-inch (6th generation)", "m2"),
        ("MacBook Air M2", "m2"),
        ("MacBook Pro (M3 Max)", "m3-max"),
        ("M3 Max", "m3-max"),
        ("Apple M4", "m4"),
    ],
)
def test_a_product_is_told_its_chip(product: str, chip: str) -> None:
    with pytest.raises(CetaneError) as error:
        find_chip(product)
    assert error.value.hint == f"for {load_chips()[chip].name}, write {chip}"


def test_each_product_has_one_chip() -> None:
    products = [product for chip in load_chips().values() for product in chip.sold_in]
    assert len(products) == len(set(products))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a", "not TOML"),
        ("a = 1", "a"),
        ('[a]\nname = "A"\nspeed = 3', "speed"),
        ('[a]\nname = "A"\nstream = [{ value = 1.0, date = "2026" }]', "stream.0.source"),
        (
            '[a]\nname = "A"\nstream = [{ value = 0, source = "x", date = "2026" }]',
            "stream.0.value",
        ),
        ('[a]\nname = "A"\nstream = [{ value = inf, source = "x", date = "2026" }]', "stream.0"),
        (f'[a]\nname = "A"\nfallback = "b"\n{RECORD}', "fallback 'b'"),
        (f'[a]\nname = "A"\nfallback = "a"\n{RECORD}', "fallback 'a'"),
        ('[a]\nname = "A"\nfallback = "b"\n[b]\nname = "B"\nfallback = "a"', "fallback"),
    ],
)
def test_bad_profiles(text: str, wrong: str) -> None:
    with pytest.raises(CetaneError, match="chips") as raised:
        parse_chips(text)
    assert wrong in raised.value.message


def test_a_chip_without_figure_or_fallback() -> None:
    (chip,) = parse_chips(f'[a]\nname = "A"\n{RECORD}').values()
    with pytest.raises(CetaneError, match="a has neither a compute nor a fallback"):
        chip.figure("compute")
