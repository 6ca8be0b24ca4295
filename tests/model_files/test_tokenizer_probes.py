"""Two tokenizers with the same tokens that split texts otherwise are told apart, and the text is named."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors

from tests.support.model_folder import byte_level, metaspace, with_byte_fallback, write_model
from tokenbus.model_files import ModelTokenizer
from tokenbus.tokenizer_probes import PROBES, digest_of, encoder_of, first_difference, probed


def _digits_apart(tokenizer: Tokenizer) -> None:
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def _begins_each_text(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing("<tool> $A", special_tokens=[("<tool>", 0)])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_digits_apart, "12345678"),
        (_begins_each_text, PROBES[0]),
        (lambda tokenizer: setattr(tokenizer, "normalizer", None), None),
    ],
)
def test_difference_is_found_and_named(change: object, text: str | None, tmp_path: Path) -> None:
    changed = byte_level()
    assert callable(change)
    change(changed)
    one = ModelTokenizer(write_model(tmp_path / "one", byte_level()))
    other = ModelTokenizer(write_model(tmp_path / "other", changed))
    probes, others = probed(encoder_of(one)), probed(encoder_of(other))
    assert first_difference(probes, others) == text
    assert (digest_of(one, probes) == digest_of(other, others)) == (text is None)


def test_each_probe_is_its_own() -> None:
    assert len(set(PROBES)) == len(PROBES) < 1024


@pytest.mark.parametrize("make", [byte_level, with_byte_fallback, metaspace])
def test_probes_are_numbers_of_32_bits(make: object, tmp_path: Path) -> None:
    assert callable(make)
    found = probed(encoder_of(ModelTokenizer(write_model(tmp_path / "model", make()))))
    assert len(found) == len(PROBES)
    assert 0 <= min(found) < max(found) < 2**32
