"""The parts of a choice while its output grows."""

from __future__ import annotations

from flashlatte.engine import CompletionOutput, RequestOutput, SamplingParams
from flashlatte.serve.job import ChoicePart, ChoiceReader, GenerationJob


class Form:
    id_prefix, object, chunk_object = "a", "b", "c"

    def choice(self, part: ChoicePart) -> dict[str, object]:
        return vars(part)

    chunk = choice


class Bytes:
    def decode(self, tokens: list[int], **_: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_the_first_part_is_the_first_that_has_text():
    """Chat sends the role with it."""
    params = SamplingParams(max_tokens=4, stop=["END"])
    job = GenerationJob([[1]], params, Form(), "prompt", True, False)
    output = CompletionOutput(0, params, 1, Bytes())
    request = RequestOutput("r", None, [1], [output])
    reader, parts = ChoiceReader(job, 0, output), []
    for token in "éEN".encode():
        output.extend([token], [], [])
        if len(output.token_ids) == 4:
            output.finish_reason = "length"
        parts.append(reader.next(request, output))
    assert [None if part is None else (part.text, part.is_first) for part in parts] == [
        None,
        None,
        None,
        ("éEN", True),
    ]
    assert reader.next(request, output) is None
