"""The front end without transport: accepting, streaming, cancelling, losing instances, draining."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from fake_instance import FakeInstance, output_of
from harness import MODEL, metric_value, running_frontend, until

from control_plane import step_pace
from control_plane.errors import ApiError, ErrorKind
from control_plane.frontend import FrontendConfig
from control_plane.generation import (
    CancelOutcome,
    Delta,
    Final,
    GenerationRequest,
    OnDisconnect,
    TextPrompt,
    TokenPrompt,
)
from control_plane.tokenizer import CONTEXT_TOKENS
from control_plane.validation import Limits
from scheduler.request import FinishReason

PROMPT = (20, 21, 22)
GREEDY = GenerationRequest(TokenPrompt(PROMPT), max_tokens=5, temperature=0, on_disconnect=OnDisconnect.DETACH)


async def read(reader):
    """All token ids and the final event of a stream, with the promises of a stream checked."""
    token_ids, final = [], None
    async with reader:
        async for event in reader:
            assert final is None, "nothing may follow the final event"
            if isinstance(event, Delta):
                token_ids += event.token_ids
                assert event.token_ids
            else:
                final = event
    assert final is not None
    return token_ids, final


async def test_tokens_come_in_order_and_one_final_event_ends_them():
    async with running_frontend() as (frontend, _, _):
        accepted = await frontend.submit(GREEDY)
        assert accepted.num_prompt_tokens == 3
        token_ids, final = await read(frontend.stream(accepted.request_id))
    assert token_ids == output_of(PROMPT, 5)
    assert final.finish_reason is FinishReason.LENGTH
    assert final.error is None
    assert (final.num_prompt_tokens, final.num_output_tokens, final.matched_stop_token) == (3, 5, None)
    assert 0 < final.ttft_s <= final.total_s


async def test_a_stop_token_is_told_and_its_text_is_not(byte_tokenizer):
    third = output_of(PROMPT, 3, 128)[2]
    async with running_frontend(tokenizer=byte_tokenizer, vocab_size=128) as (frontend, _, _):
        reader = await frontend.generate(replace(GREEDY, stop_token_ids=(third,)))
        events = []
        async with reader:
            events = [event async for event in reader]
    final = events[-1]
    assert (final.finish_reason, final.matched_stop_token, final.num_output_tokens) == (FinishReason.STOP, third, 3)
    text = "".join(event.text for event in events[:-1])
    assert text == byte_tokenizer.decode(output_of(PROMPT, 2, 128))


async def test_model_eos_ids_stop_unless_ignored():
    eos = output_of(PROMPT, 2)[1]

    async with running_frontend(model=replace(MODEL, eos_token_ids=(eos,))) as (frontend, _, _):
        _, final = await read(await frontend.generate(GREEDY))
        assert (final.finish_reason, final.num_output_tokens) == (FinishReason.STOP, 2)
        _, final = await read(await frontend.generate(replace(GREEDY, ignore_eos=True)))
        assert (final.finish_reason, final.num_output_tokens) == (FinishReason.LENGTH, 5)


async def test_submissions_of_one_moment_go_to_the_instance_in_one_call():
    async with running_frontend() as (frontend, _, instance):
        await asyncio.gather(*(frontend.submit(GREEDY) for _ in range(50)))
        await until(lambda: len(instance.submitted) == 50)
        assert instance.submit_calls <= 2


async def test_seeds_are_drawn_and_told():
    async with running_frontend() as (frontend, _, instance):
        finals = [(await read(await frontend.generate(GREEDY)))[1] for _ in range(3)]
        assert len({final.seed for final in finals}) == 3
        assert [request.sampling.seed for request in instance.submitted] == [final.seed for final in finals]
        _, final = await read(await frontend.generate(replace(GREEDY, seed=7)))
        assert final.seed == 7


async def test_owners_share_no_cached_pages_and_no_ids():
    async with running_frontend() as (frontend, _, instance):
        for owner in ("", "a", "b"):
            await read(await frontend.generate(replace(GREEDY, cache_salt="x"), owner))
        await until(lambda: len(instance.submitted) == 3)
        assert len({request.cache_salt for request in instance.submitted}) == 3

        named = replace(GREEDY, request_id="same", max_tokens=400)
        await frontend.submit(named, "a")
        await frontend.submit(named, "b")
        with pytest.raises(ApiError) as caught:
            await frontend.submit(named, "a")
        assert caught.value.kind is ErrorKind.ALREADY_EXISTS
        assert frontend.cancel("same", "c") is CancelOutcome.NOT_FOUND
        assert frontend.cancel("same", "a") is CancelOutcome.CANCELLED
        assert frontend.num_live == 1


# Cancelling: whatever the state, the engine lets go and there is one final event.


@pytest.mark.parametrize("state", ["unsent", "queued", "prefill", "decode"])
async def test_cancel_frees_the_engine_and_ends_the_stream_once(state):
    async with running_frontend(auto=False, max_slots=1, chunk=2) as (frontend, metrics, instance):
        if state == "queued":
            await frontend.submit(GREEDY)
        reader = await frontend.generate(replace(GREEDY, request_id="it", max_tokens=100))
        reading = asyncio.create_task(read(reader))
        if state != "unsent":
            await until(lambda: instance.submitted)
            await asyncio.sleep(0.01)
            instance.step({"queued": 1, "prefill": 1, "decode": 4}[state])
            await asyncio.sleep(0.01)
        expected = 1 if state == "queued" else 0
        assert frontend.cancel("it") is CancelOutcome.CANCELLED
        assert frontend.cancel("it") in (CancelOutcome.ALREADY_FINISHED, CancelOutcome.NOT_FOUND)
        token_ids, final = await reading
        await until(lambda: instance.num_held == expected)
        instance.step()
        await asyncio.sleep(0.01)
    assert final.finish_reason is FinishReason.CANCELLED
    assert final.error.kind is ErrorKind.CANCELLED
    assert token_ids == output_of(PROMPT, len(token_ids))
    assert bool(token_ids) == (state == "decode")
    assert metric_value(metrics, "nanoflow_requests_total", outcome="cancelled") >= 1


async def test_what_is_known_of_a_request_is_told_when_it_is_cancelled_or_expires():
    async with running_frontend(auto=False, max_slots=2) as (frontend, metrics, instance):
        instance.num_cached, instance.from_store = 2, (0, 1)
        began = time.monotonic()
        started = [
            await frontend.generate(replace(GREEDY, request_id="cancelled")),
            await frontend.generate(replace(GREEDY, timeout_s=0.5)),
        ]
        waiting = await frontend.generate(replace(GREEDY, timeout_s=0.5))
        await until(lambda: instance.num_held == 3)
        instance.step()
        await until(lambda: metric_value(metrics, "nanoflow_generation_tokens_total") == 2)
        in_queue_s = time.monotonic() - began
        frontend.cancel("cancelled")
        finals = [final for _, final in await asyncio.gather(*map(read, [*started, waiting]))]
    for final in finals[:2]:
        assert (final.num_cached_tokens, final.num_output_tokens) == (2, 1)
        assert (final.num_cpu_cached_tokens, final.num_ssd_cached_tokens) == (0, 1)
        assert 0.001 <= final.queue_s <= in_queue_s
    assert (finals[2].num_cached_tokens, finals[2].num_output_tokens) == (0, 0)
    assert finals[2].queue_s == pytest.approx(finals[2].total_s)
    assert metric_value(metrics, "nanoflow_prompt_tokens_cached_total") == 4


async def test_cancel_after_the_end_and_of_unknown_ids_is_harmless():
    async with running_frontend() as (frontend, metrics, _):
        accepted = await frontend.submit(GREEDY)
        await until(lambda: frontend.num_live == 0)
        assert frontend.cancel(accepted.request_id) is CancelOutcome.ALREADY_FINISHED
        assert frontend.cancel("never heard of") is CancelOutcome.NOT_FOUND
        token_ids, final = await read(frontend.stream(accepted.request_id))
        assert (len(token_ids), final.finish_reason) == (5, FinishReason.LENGTH)
        assert metric_value(metrics, "nanoflow_requests_total", outcome="cancelled") == 0


# Readers


async def test_a_reader_that_leaves_cancels_or_detaches_as_asked():
    async with running_frontend(step_s=0.005) as (frontend, _, instance):
        for on_disconnect in OnDisconnect:
            request = replace(GREEDY, request_id="it", max_tokens=40, on_disconnect=on_disconnect)
            async with await frontend.generate(request) as reader:
                first = await anext(reader)
            if on_disconnect is OnDisconnect.CANCEL:
                await until(lambda: instance.num_held == 0)
                with pytest.raises(ApiError) as caught:
                    frontend.stream("it")
                assert caught.value.kind is ErrorKind.NOT_FOUND
            else:
                rest, final = await read(frontend.stream("it", resume_from=first.num_output_tokens))
                assert [*first.token_ids, *rest] == output_of(PROMPT, 40)
                assert final.finish_reason is FinishReason.LENGTH


async def test_one_reader_at_a_time():
    async with running_frontend(step_s=0.005) as (frontend, _, _):
        await frontend.submit(replace(GREEDY, request_id="it", max_tokens=50))
        async with frontend.stream("it"):
            with pytest.raises(ApiError) as caught:
                frontend.stream("it")
            assert caught.value.kind is ErrorKind.ALREADY_EXISTS
        assert (await read(frontend.stream("it")))[0] == output_of(PROMPT, 50)


async def test_resuming_outside_of_what_is_kept_is_refused():
    async with running_frontend(limits=Limits(max_buffered_tokens=10)) as (frontend, _, _):
        await frontend.submit(replace(GREEDY, request_id="it", max_tokens=60))
        async with frontend.stream("it") as reader:
            events = [event async for event in reader]
        assert isinstance(events[-1], Final)
        assert events[-1].num_output_tokens == 60
        for resume_from in (0, 61):
            with pytest.raises(ApiError) as caught:
                frontend.stream("it", resume_from=resume_from)
            assert caught.value.kind is ErrorKind.OUT_OF_RANGE
        token_ids, final = await read(frontend.stream("it", resume_from=55))
        assert token_ids == output_of(PROMPT, 60)[55:]
        assert final == events[-1]


async def test_without_a_reader_a_request_ends_after_its_time():
    limits = Limits(detached_ttl_s=0.1)
    async with running_frontend(limits=limits, step_s=0.01) as (frontend, metrics, instance):
        await frontend.submit(replace(GREEDY, request_id="long", max_tokens=400))
        await frontend.submit(replace(GREEDY, request_id="short", max_tokens=1))
        await until(lambda: instance.num_held == 1)
        await until(lambda: instance.num_held == 0)
        for request_id in ("long", "short"):
            await until(lambda: frontend.cancel(request_id) is CancelOutcome.NOT_FOUND)  # noqa: B023 - awaited here
        assert metric_value(metrics, "nanoflow_requests_total", outcome="cancelled") == 1
        assert metric_value(metrics, "nanoflow_requests_total", outcome="completed") == 1


async def test_a_reader_too_slow_is_dropped_and_others_are_not():
    limits = Limits(max_buffered_tokens=20)
    async with running_frontend(limits=limits) as (frontend, _, instance):
        slow = await frontend.generate(replace(GREEDY, max_tokens=300))
        async with slow:
            await anext(slow)
            token_ids, _ = await read(await frontend.generate(replace(GREEDY, max_tokens=60)))
            assert token_ids == output_of(PROMPT, 60)
            await until(lambda: instance.num_held == 0)
            events = [event async for event in slow]
    assert events[-1].finish_reason is FinishReason.CANCELLED
    assert events[-1].error.kind is ErrorKind.OVERLOADED
    assert sum(len(event.token_ids) for event in events[:-1]) <= 20


async def test_ended_requests_are_kept_in_bounded_number():
    async with running_frontend(limits=Limits(max_kept_requests=3)) as (frontend, _, _):
        for index in range(6):
            await frontend.submit(replace(GREEDY, request_id=f"r{index}"))
            await until(lambda: frontend.num_live == 0)
        outcomes = [frontend.cancel(f"r{index}") for index in range(6)]
        assert outcomes == [CancelOutcome.NOT_FOUND] * 3 + [CancelOutcome.ALREADY_FINISHED] * 3


async def test_an_ended_request_that_is_kept_does_not_keep_its_prompt(byte_tokenizer):
    class Token(int):
        gone = 0

        def __del__(self):
            Token.gone += 1

    async with running_frontend(tokenizer=byte_tokenizer) as (frontend, _, instance):
        prompt = [Token(40) for _ in range(50)]
        await frontend.submit(replace(GREEDY, prompt=TokenPrompt(prompt), request_id="it"))
        del prompt
        await until(lambda: frontend.num_live == 0)
        instance.submitted.clear()
        gc.collect()
        assert Token.gone >= 50 - CONTEXT_TOKENS
        token_ids, final = await read(frontend.stream("it"))
    assert (token_ids, final.num_prompt_tokens) == (output_of([40] * 50, 5), 50)


async def test_an_id_may_be_used_again_after_its_request_ended():
    async with running_frontend() as (frontend, _, _):
        for _ in range(2):
            await frontend.submit(replace(GREEDY, request_id="it"))
            await until(lambda: frontend.num_live == 0)
        token_ids, _ = await read(frontend.stream("it"))
        assert token_ids == output_of(PROMPT, 5)


# Time


async def test_a_deadline_ends_a_request_that_waits_runs_or_hangs():
    async with running_frontend(max_slots=1, step_s=0.01) as (frontend, metrics, instance):
        running = await frontend.generate(replace(GREEDY, max_tokens=400, timeout_s=0.15))
        waiting = await frontend.generate(replace(GREEDY, timeout_s=0.1))
        (some, late), (none, never) = await asyncio.gather(read(running), read(waiting))
        await until(lambda: instance.num_held == 0)
        instance.stalled = True
        _, hung = await read(await frontend.generate(replace(GREEDY, timeout_s=0.05)))
    assert some
    assert not none
    for final in (late, never, hung):
        assert final.finish_reason is FinishReason.EXPIRED
        assert final.error.kind is ErrorKind.EXPIRED
    assert metric_value(metrics, "nanoflow_requests_total", outcome="expired") == 3


# Load


async def test_queue_limits_hold_exactly_and_free_up():
    limits = Limits(max_num_queued_reqs=3, max_num_queued_tokens=10)
    async with running_frontend(limits=limits, auto=False) as (frontend, metrics, instance):
        results = await asyncio.gather(*(frontend.submit(GREEDY) for _ in range(9)), return_exceptions=True)
        refused = [each for each in results if isinstance(each, ApiError)]
        assert len(refused) == 6
        assert all(each.kind is ErrorKind.OVERLOADED and each.retry_after_s > 0 for each in refused)
        assert metric_value(metrics, "nanoflow_requests_rejected_total", reason="overloaded") == 6
        await until(lambda: instance.num_held == 3)
        instance.step()
        await asyncio.sleep(0.01)
        await frontend.submit(replace(GREEDY, prompt=TokenPrompt(PROMPT * 3)))  # 9 tokens
        with pytest.raises(ApiError, match="9 prompt tokens wait"):
            await frontend.submit(GREEDY)
        await frontend.submit(replace(GREEDY, prompt=TokenPrompt((20,))))


async def test_requests_whose_prompts_are_being_tokenized_count_as_waiting(byte_tokenizer):
    class Slow:
        def __init__(self):
            self.go_on = threading.Event()

        def encode(self, text):
            assert self.go_on.wait(10)
            return byte_tokenizer.encode(text)

        def detokenizer(self, prompt_token_ids):
            return byte_tokenizer.detokenizer(prompt_token_ids)

    tokenizer = Slow()
    async with running_frontend(limits=Limits(max_num_queued_reqs=3), tokenizer=tokenizer) as (frontend, _, _):
        long = replace(GREEDY, prompt=TextPrompt("x" * 2000))
        short = replace(GREEDY, prompt=TextPrompt("x" * 400))
        tokenizing = [asyncio.create_task(frontend.submit(long)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await frontend.submit(short)
        assert caught.value.kind is ErrorKind.OVERLOADED
        tokenizing[0].cancel()
        tokenizer.go_on.set()
        results = await asyncio.gather(*tokenizing, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert [result.kind for result in results[1:]] == [ErrorKind.INVALID_ARGUMENT] * 2  # longer than the context
        assert len((await read(await frontend.generate(short)))[0]) == 5
        assert not frontend._admission._waiting


async def test_text_that_is_being_tokenized_counts_by_its_size(byte_tokenizer):
    request = replace(GREEDY, prompt=TextPrompt("x" * 4000))
    limits = Limits(max_num_queued_tokens=1500)
    async with running_frontend(limits=limits, tokenizer=byte_tokenizer) as (frontend, _, _):
        results = await asyncio.gather(*(frontend.submit(request) for _ in range(2)), return_exceptions=True)
    # The first is refused for what it is; beside it there was no room for the second.
    assert [error.kind for error in results] == [ErrorKind.INVALID_ARGUMENT, ErrorKind.OVERLOADED]


# Faults


async def test_a_fault_in_one_request_leaves_its_neighbours_alone(byte_tokenizer):
    class Explosive:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def detokenizer(self, prompt_token_ids):
            if prompt_token_ids[0] == 99:
                raise_later = type("Broken", (), {"push": lambda self, token: 1 / 0, "finish": lambda self: ""})
                return raise_later()
            return self.tokenizer.detokenizer(prompt_token_ids)

    async with running_frontend(tokenizer=Explosive(byte_tokenizer)) as (frontend, _, instance):
        instance.fail_on[98, 1] = "its logits were not finite"
        prompts = [(20, 1), (99, 1), (98, 1), (21, 1)]
        readers = [await frontend.generate(replace(GREEDY, prompt=TokenPrompt(prompt))) for prompt in prompts]
        good, broken, failed, fine = await asyncio.gather(*map(read, readers))
        await until(lambda: instance.num_held == 0)
    assert good[0] == output_of(prompts[0], 5)
    assert fine[0] == output_of(prompts[3], 5)
    assert broken[1].error.kind is failed[1].error.kind is ErrorKind.INTERNAL
    assert "not finite" in failed[1].error.message


async def test_when_an_instance_is_lost_the_unread_start_again_and_the_read_end_once():
    async with running_frontend(step_s=0.005) as (frontend, metrics, instance):
        streamed = await frontend.generate(replace(GREEDY, max_tokens=300))
        unread = await frontend.submit(replace(GREEDY, max_tokens=30))
        async with streamed:
            first = await anext(streamed)
            await until(lambda: instance.num_held == 2)
            await asyncio.sleep(0.03)  # the unread one has output, too: nobody has seen it
            fresh = asyncio.create_task(read(await frontend.generate(GREEDY)))
            instance.lose()
            events = [event async for event in streamed]
            assert frontend.health().alive is False
            with pytest.raises(ApiError) as caught:
                await frontend.submit(GREEDY)
            assert caught.value.kind is ErrorKind.UNAVAILABLE
            assert frontend.num_homeless == 2
            frontend.attach(replacement := FakeInstance("fake-1"))
            token_ids, final = await read(frontend.stream(unread.request_id))
        assert (await fresh)[0] == output_of(PROMPT, 5)
        await replacement.close()
    assert events[-1].finish_reason is FinishReason.FAILED
    assert events[-1].error.kind is ErrorKind.UNAVAILABLE
    assert sum(isinstance(event, Final) for event in events) == 1
    got = [*first.token_ids, *(token for event in events[:-1] for token in event.token_ids)]
    assert got == output_of(PROMPT, len(got))
    assert token_ids == output_of(PROMPT, 30)
    assert final.finish_reason is FinishReason.LENGTH
    assert metric_value(metrics, "nanoflow_request_retries_total") == 2
    produced = metric_value(metrics, "nanoflow_generation_tokens_total")
    discarded = metric_value(metrics, "nanoflow_discarded_tokens_total")
    assert produced - discarded == metric_value(metrics, "nanoflow_request_generation_tokens_sum")


async def test_times_of_a_request_that_started_again_are_those_of_the_tokens_that_were_read():
    async with running_frontend(auto=False) as (frontend, metrics, instance):
        began = time.monotonic()
        accepted = await frontend.submit(GREEDY)
        await until(lambda: instance.submitted)
        instance.step(2)
        await until(lambda: metric_value(metrics, "nanoflow_generation_tokens_total") == 2)
        instance.lose()
        await until(lambda: frontend.num_homeless == 1)
        await asyncio.sleep(0.3)  # the recovery
        frontend.attach(replacement := FakeInstance("fake-1"))
        token_ids, final = await read(frontend.stream(accepted.request_id))
        without_recovery_s = time.monotonic() - began - 0.3
        await replacement.close()
    assert token_ids == output_of(PROMPT, 5)
    assert final.queue_s >= 0.3
    assert final.queue_s <= final.ttft_s <= final.total_s
    assert metric_value(metrics, "nanoflow_time_to_first_token_seconds_count") == 1
    assert metric_value(metrics, "nanoflow_time_to_first_token_seconds_sum") == final.ttft_s
    assert metric_value(metrics, "nanoflow_prompt_tokens_total") == 3
    gaps = metric_value(metrics, "nanoflow_inter_token_latency_seconds_count")
    assert gaps == (2 - 1) + (5 - 1)
    assert metric_value(metrics, "nanoflow_inter_token_latency_seconds_sum") <= without_recovery_s
    assert metric_value(metrics, "nanoflow_request_decode_time_seconds_sum") <= without_recovery_s


async def test_a_first_token_that_was_lost_and_never_came_again_counts_nowhere():
    config = FrontendConfig(reattach_timeout_s=0.1)
    async with running_frontend(config=config, auto=False) as (frontend, metrics, instance):
        accepted = await frontend.submit(GREEDY)
        await until(lambda: instance.submitted)
        instance.step()
        await until(lambda: metric_value(metrics, "nanoflow_generation_tokens_total") == 1)
        instance.lose()
        await until(lambda: frontend.num_homeless == 1)
        token_ids, final = await read(frontend.stream(accepted.request_id))
    assert (token_ids, final.ttft_s, final.num_output_tokens) == ([], None, 0)
    assert metric_value(metrics, "nanoflow_time_to_first_token_seconds_count") == 0
    assert metric_value(metrics, "nanoflow_prompt_tokens_total") == 0


@pytest.mark.parametrize("resume_from", [0, 1, 3])
async def test_a_reader_keeps_its_position_when_the_request_starts_again(resume_from):
    async with running_frontend(auto=False) as (frontend, _, instance):
        accepted = await frontend.submit(replace(GREEDY, max_tokens=8))
        await until(lambda: instance.submitted)
        instance.step(3)
        live = frontend._requests.find("", accepted.request_id)
        await until(lambda: live.output.num_tokens == 3)
        reader = frontend.stream(accepted.request_id, resume_from=resume_from)
        instance.lose()  # before the reader has asked for anything
        await until(lambda: frontend.num_homeless == 1)
        frontend.attach(replacement := FakeInstance("fake-1"))
        token_ids, final = await asyncio.wait_for(read(reader), 5)
        await replacement.close()
    assert token_ids == output_of(PROMPT, 8)[resume_from:]
    assert final.num_output_tokens == 8


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_lost_readers_get_every_token_once_or_an_error(seed):
    rng = random.Random(seed)
    config = FrontendConfig(max_attempts=100)

    async def follow(number):
        prompt = (20 + number, 21)
        request = replace(GREEDY, prompt=TokenPrompt(prompt), max_tokens=20, request_id=f"r{number}")
        while not frontend.health().ready:  # noqa: ASYNC110 - as clients do that are told to try again
            await asyncio.sleep(0.001)
        await frontend.submit(request)
        await asyncio.sleep(rng.random() / 10)
        token_ids, final = [], None
        while final is None:
            async with frontend.stream(f"r{number}", resume_from=len(token_ids)) as reader:
                async for event in reader:
                    if isinstance(event, Final):
                        final = event
                        break
                    token_ids += event.token_ids
                    assert event.num_output_tokens == len(token_ids)
                    if rng.random() < 0.2:
                        break
        assert token_ids == output_of(prompt, 20)[: len(token_ids)]
        assert final.num_output_tokens == len(token_ids)
        assert final.error is None or final.error.kind is ErrorKind.UNAVAILABLE
        return final.finish_reason

    async with running_frontend(config=config, step_s=0.002) as (frontend, metrics, first):
        instances = [first]
        following = [asyncio.create_task(follow(number)) for number in range(60)]
        while sum(task.done() for task in following) < 50:  # the others end, however slow the machine is
            await asyncio.sleep(rng.random() / 10)
            instances[-1].lose()
            await until(lambda: not list(frontend.instances))
            instances.append(FakeInstance("fake-0", step_s=0.002))
            frontend.attach(instances[-1])
        reasons = Counter(await asyncio.gather(*following))
        for instance in instances[1:]:
            await instance.close()
    assert set(reasons) == {FinishReason.LENGTH, FinishReason.FAILED}
    assert metric_value(metrics, "nanoflow_request_retries_total") > 0
    kept = metric_value(metrics, "nanoflow_generation_tokens_total") - metric_value(
        metrics, "nanoflow_discarded_tokens_total"
    )
    assert kept == metric_value(metrics, "nanoflow_request_generation_tokens_sum")
    assert metric_value(metrics, "nanoflow_prompt_tokens_total") == metric_value(
        metrics, "nanoflow_request_prompt_tokens_sum"
    )


async def test_a_request_is_not_tried_for_ever():
    config = FrontendConfig(max_attempts=2)
    async with running_frontend(config=config, auto=False) as (frontend, _, instance):
        reading = asyncio.create_task(read(await frontend.generate(GREEDY)))
        await until(lambda: instance.submitted)
        instance.lose()
        await until(lambda: frontend.num_homeless == 1)
        frontend.attach(second := FakeInstance("fake-1", auto=False))
        await until(lambda: second.submitted)
        second.lose()
        _, final = await asyncio.wait_for(reading, 5)
    assert final.error.kind is ErrorKind.UNAVAILABLE


async def test_a_request_waits_for_another_instance_only_so_long_and_can_be_cancelled_meanwhile():
    config = FrontendConfig(reattach_timeout_s=0.1)
    async with running_frontend(config=config, auto=False) as (frontend, _, instance):
        waiting = asyncio.create_task(read(await frontend.generate(GREEDY)))
        cancelled = asyncio.create_task(read(await frontend.generate(replace(GREEDY, request_id="it"))))
        await until(lambda: instance.num_held == 2)
        instance.lose()
        await until(lambda: frontend.num_homeless == 2)
        frontend.cancel("it")
        assert (await cancelled)[1].finish_reason is FinishReason.CANCELLED
        assert (await asyncio.wait_for(waiting, 5))[1].error.kind is ErrorKind.UNAVAILABLE
        assert frontend.num_homeless == frontend.num_live == 0


async def test_with_two_instances_load_is_shared_and_the_loss_of_one_goes_unnoticed():
    async with running_frontend(auto=False) as (frontend, _, first):
        frontend.attach(second := FakeInstance("fake-1", auto=False))
        readings = [asyncio.create_task(read(await frontend.generate(GREEDY))) for _ in range(6)]
        await until(lambda: first.num_held == second.num_held == 3)
        first.lose()
        await until(lambda: second.num_held == 6)
        assert frontend.health().ready
        second.step(5)
        assert [token_ids for token_ids, _ in await asyncio.gather(*readings)] == [output_of(PROMPT, 5)] * 6
        await second.close()


# Health and the end


async def test_health_comes_from_the_engine():
    config = FrontendConfig(stall_timeout_s=0.1)
    async with running_frontend(None, config=config) as (frontend, _, _):
        assert (frontend.health().ready, frontend.health().alive) == (False, True)
        frontend.attach(instance := FakeInstance())
        await asyncio.sleep(0.15)
        assert frontend.health().ready  # without work no iteration is expected
        instance.stalled = True
        reading = asyncio.create_task(read(await frontend.generate(GREEDY)))
        assert frontend.health().ready
        await until(lambda: not frontend.health().ready)
        assert not frontend.health().alive
        with pytest.raises(ApiError):
            await frontend.submit(GREEDY)
        instance.stalled = False
        await reading
        assert frontend.health().ready
        await instance.close()


async def test_once_it_has_a_pace_a_stall_is_noticed_long_before_the_stall_timeout(monkeypatch):
    monkeypatch.setattr(step_pace, "SHORTEST_S", 0.1)
    async with running_frontend() as (frontend, _, instance):
        await read(await frontend.generate(replace(GREEDY, prompt=TokenPrompt(PROMPT * 20))))
        instance.stalled = True
        reading = asyncio.create_task(read(await frontend.generate(GREEDY)))
        assert frontend.health().ready
        await until(lambda: not frontend.health().ready, timeout_s=2)
        instance.stalled = False
        await reading
        assert frontend.health().ready


async def test_drain_refuses_new_requests_and_lets_live_ones_finish():
    async with running_frontend(step_s=0.003) as (frontend, _, _):
        readings = [asyncio.create_task(read(await frontend.generate(replace(GREEDY, max_tokens=30))))]
        detached = await frontend.submit(GREEDY)
        draining = asyncio.create_task(frontend.drain(10))
        await asyncio.sleep(0)
        assert not frontend.health().ready
        with pytest.raises(ApiError) as caught:
            await frontend.submit(GREEDY)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        await readings[0]
        assert not draining.done()  # the detached one has not been read
        assert len((await read(frontend.stream(detached.request_id)))[0]) == 5
        assert await draining is True


async def test_drain_waits_for_the_reader_of_an_ended_request_whose_id_was_used_again():
    async with running_frontend() as (frontend, _, _):
        request = replace(GREEDY, request_id="it")
        first = await frontend.generate(request)
        async with first:
            await until(lambda: frontend.num_live == 0)
            await read(await frontend.generate(request))
            assert frontend.num_live == 0
            draining = asyncio.create_task(frontend.drain(10))
            await asyncio.sleep(0.05)
            assert not draining.done()
            events = [event async for event in first]
        assert await draining is True
        assert events[0].token_ids == tuple(output_of(PROMPT, 5))
        assert len(events) == 2
        assert list(frontend._requests) == [frontend._requests.find("", "it")]


async def test_a_drain_needs_an_instance_only_for_requests_that_have_lost_theirs():
    async with running_frontend(auto=False) as (frontend, _, instance):
        reading = asyncio.create_task(read(await frontend.generate(GREEDY)))
        await until(lambda: instance.submitted)
        assert frontend.needs_instance
        draining = asyncio.create_task(frontend.drain(10))
        await until(lambda: not frontend.needs_instance)
        instance.lose()
        await until(lambda: frontend.num_homeless == 1)
        assert frontend.needs_instance
        frontend.attach(replacement := FakeInstance("fake-1"))
        assert (await reading)[0] == output_of(PROMPT, 5)
        assert await draining is True
        assert not frontend.needs_instance
        await replacement.close()


async def test_drain_ends_what_does_not_finish_in_time():
    async with running_frontend(auto=False) as (frontend, metrics, instance):
        reading = asyncio.create_task(read(await frontend.generate(GREEDY)))
        await until(lambda: instance.submitted)
        assert await frontend.drain(0.1) is False
        _, final = await reading
        assert final.error.kind is ErrorKind.UNAVAILABLE
        assert metric_value(metrics, "nanoflow_requests_total", outcome="failed") == 1


async def test_nothing_is_left_behind_after_many_requests_of_all_kinds():
    async with running_frontend(step_s=0.0005) as (frontend, metrics, instance):

        async def one(index):
            request = replace(GREEDY, request_id=f"r{index}", max_tokens=1 + index % 7)
            request = replace(request, on_disconnect=[OnDisconnect.CANCEL, OnDisconnect.DETACH][index % 2])
            reader = await frontend.generate(request)
            async with reader:
                if index % 5 == 0:
                    frontend.cancel(f"r{index}")
                if index % 3:
                    async for _ in reader:
                        pass

        for start in range(0, 300, 50):
            await asyncio.gather(*(one(index) for index in range(start, start + 50)))
        await until(lambda: instance.num_held == 0 and frontend.num_live == 0)
        (link,) = frontend.instances
        assert not link.assigned
        assert frontend._dispatcher.is_idle
        assert not frontend._admission._waiting
        assert frontend._admission._num_tokens == 0
        accepted = metric_value(metrics, "nanoflow_requests_accepted_total")
        assert accepted == metric_value(metrics, "nanoflow_requests_total") == 300
