"""Runs a parsed request and builds its response: complete, or as a stream of events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from flashlatte.engine.output_stream import OutputStream
from flashlatte.engine.outputs import RequestOutput
from flashlatte.serve.context import ServerContext
from flashlatte.serve.errors import ApiError, engine_error, field_error
from flashlatte.serve.job import ChoiceReader, GenerationJob
from flashlatte.serve.responses import to_json

_logger = logging.getLogger(__name__)

# Maximum number of log-probabilities of a request: about 1 GB of Python objects.
MAX_LOGPROBS_OF_REQUEST = 1 << 22


async def start(context: ServerContext, job: GenerationJob) -> OutputStream:
    """Queue a request. The caller closes its stream.

    Raises:
        ApiError: the engine refuses it.
    """
    context.check_num_outputs(len(job.prompts), job.sampling.n, job.prompt_field)
    _check_num_logprobs(job)
    request_ids = [f"{job.form.id_prefix}{job.id}-{number}" for number in range(len(job.prompts))]
    try:
        return await context.engine.add(job.prompts, job.sampling, request_ids=request_ids, cache_salt=job.cache_salt)
    except (TypeError, ValueError) as error:
        raise field_error(error, {job.prompt_field, *vars(job.sampling)}) from error
    except RuntimeError as error:
        raise engine_error(error) from error


async def whole_answer(context: ServerContext, job: GenerationJob, stream: OutputStream) -> dict[str, Any]:
    """The complete response, after the last token.

    Raises:
        ApiError: the engine failed, or the logits of an output were NaN.
    """
    results: dict[int, RequestOutput] = {}
    with context.metrics.measuring(job) as timer:
        try:
            async for index, request in stream:
                timer.update(index, request)
                results[index] = request
        except RuntimeError as error:
            raise engine_error(error) from error
    choices = []
    for index in sorted(results):
        for output in results[index].outputs:
            _check_succeeded(output.error)
            part = ChoiceReader(job, index, output).whole(results[index], output)
            choices.append(job.form.choice(part))
    return _envelope(context, job, job.form.object, choices) | {"usage": usage(results.values())}


async def events(context: ServerContext, job: GenerationJob, stream: OutputStream) -> AsyncGenerator[bytes, None]:
    """The response in parts, as tokens are generated. An error is the last event."""
    readers: dict[tuple[int, int], ChoiceReader] = {}
    results: dict[int, RequestOutput] = {}
    # OpenAI's parts have a usage of null if the last one has the usage.
    extra = {"usage": None} if job.include_usage else {}
    with context.metrics.measuring(job) as timer:
        try:
            async for index, request in stream:
                timer.update(index, request)
                results[index] = request
                for output in request.outputs:
                    _check_succeeded(output.error)
                    key = index, output.index
                    if key not in readers:
                        readers[key] = ChoiceReader(job, index, output)
                    if (part := readers[key].next(request, output)) is not None:
                        yield to_json(_envelope(context, job, job.form.chunk_object, [job.form.chunk(part)]) | extra)
        except (ApiError, RuntimeError) as error:
            yield to_json((error if isinstance(error, ApiError) else engine_error(error)).body())
            return
        except Exception as error:  # status 500 is too late
            _logger.exception("a stream failed")
            yield to_json(engine_error(error).body())
            return
    if job.include_usage:
        yield to_json(_envelope(context, job, job.form.chunk_object, []) | {"usage": usage(results.values())})
    yield b"[DONE]"


def usage(results: Iterable[RequestOutput]) -> dict[str, Any]:
    """The token counts of a request."""
    results = list(results)
    prompt = sum(len(request.prompt_token_ids) for request in results)
    completion = sum(len(output.token_ids) for request in results for output in request.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(request.num_cached_tokens for request in results)},
    }


def _envelope(context: ServerContext, job: GenerationJob, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": job.form.id_prefix + job.id,
        "object": kind,
        "created": job.created,
        "model": context.model_name,
        "choices": choices,
    }


def _check_num_logprobs(job: GenerationJob) -> None:
    if job.sampling.logprobs is None:
        return
    num_tokens, each = job.num_outputs * job.sampling.max_tokens, job.sampling.logprobs + 1
    if job.echo is not None:
        num_tokens += sum(map(len, job.prompts))
    if num_tokens * each > MAX_LOGPROBS_OF_REQUEST:
        raise ApiError(
            400,
            f"logprobs must be at most {MAX_LOGPROBS_OF_REQUEST} in a request, got {each} for each of {num_tokens} "
            "tokens",
            param="logprobs",
        )


def _check_succeeded(error: str | None) -> None:
    if error is not None:
        raise ApiError(500, error, code="invalid_logits")
