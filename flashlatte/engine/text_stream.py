"""The text of an output while it is generated, withheld where a stop string may begin."""

from __future__ import annotations

from flashlatte.engine.detokenizer import Detokenizer
from flashlatte.engine.outputs import CompletionOutput


class TextStream:
    """The growing text of one output. The results of ``update``, concatenated, are ``CompletionOutput.text``.

    The last characters are withheld while they may be the beginning of a stop string.

    Args:
        output: the output, or a snapshot of it, of an engine with a tokenizer.
    """

    def __init__(self, output: CompletionOutput) -> None:
        self._sampling, self._finished = output.sampling, False
        self._detokenizer = Detokenizer(output.tokenizer, skip_special_tokens=self._sampling.skip_special_tokens)
        stop = () if self._sampling.include_stop_str_in_output else tuple(self._sampling.stop or ())
        self._num_withheld = max(map(len, stop), default=1) - 1
        self._num_tokens = self._num_returned = 0
        self._pending = ""

    def update(self, output: CompletionOutput) -> str:
        """The text that was added since the last call, up to the stop string if the output has ended with one."""
        if self._finished:
            return ""
        tokens = output.token_ids[self._num_tokens :]
        self._num_tokens += len(tokens)
        keeps_stop = self._sampling.include_stop_str_in_output
        if tokens and not keeps_stop and tokens[-1] in self._sampling.all_stop_token_ids:
            tokens = tokens[:-1]
        self._pending += "".join(self._detokenizer.add(token)[0] for token in tokens)
        end = len(self._pending) - self._num_withheld
        if output.finish_reason is not None:
            self._finished = True
            self._pending += self._detokenizer.rest()
            end, match = len(self._pending), output.stop_match
            if match is not None:
                end = match.begin + (len(match.stop) if keeps_stop else 0) - self._num_returned
        text = self._pending[: max(end, 0)]
        self._pending = self._pending[len(text) :]
        self._num_returned += len(text)
        return text
