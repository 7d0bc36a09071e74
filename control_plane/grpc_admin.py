"""The Admin service: facts, load and operation of a server. Who may call it is `grpc_auth`'s to say."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from autosearch.pipeline import PipelineSchedule
from autosearch.schedule_store import StoreError, read_folder
from control_plane.errors import InvalidRequestError
from control_plane.frontend import Frontend
from control_plane.instance_link import InstanceLink
from control_plane.live_request import LiveRequest
from control_plane.pb import admin_pb2 as pb
from control_plane.pb import admin_pb2_grpc as pb_grpc
from worker.schedule_choice import gain, may_be_chosen


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts of the server that the front end does not know."""

    version: str = ""
    tensor_parallel_size: int = 1
    schedules: Path | None = None  # folder of those that serve at first


class AdminService(pb_grpc.AdminServicer):
    """nanoflow.v1.Admin."""

    def __init__(self, frontend: Frontend, info: ServerInfo) -> None:
        self._frontend = frontend
        self._info = info
        self._schedules_folder = info.schedules  # the one that was read last
        self._started = time.monotonic()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        intake = self._frontend.intake
        model, defaults = intake.model, intake.model.sampling_defaults
        return pb.GetModelInfoResponse(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=self._frontend.instances.max_model_len or 0,
            eos_token_ids=model.eos_token_ids,
            has_tokenizer=intake.tokenizer is not None,
            has_chat_template=intake.renderer is not None,
            default_temperature=defaults.temperature,
            default_top_k=defaults.top_k,
            default_top_p=defaults.top_p,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version=self._info.version,
            uptime_s=time.monotonic() - self._started,
            draining=self._frontend.draining,
            tensor_parallel_size=self._info.tensor_parallel_size,
            instances=[_instance_info(link) for link in self._frontend.instances],
            limits={name: float(value) for name, value in asdict(self._frontend.limits).items()},
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        pool = self._frontend.instances
        return pb.GetLoadsResponse(
            instances=[_instance_load(link, pool.is_healthy(link)) for link in pool],
            live_requests=self._frontend.num_live,
            homeless_requests=self._frontend.num_homeless,
        )

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        self._frontend.start_draining()
        return pb.DrainResponse(live_requests=self._frontend.num_live)

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(flushed_pages=await self._frontend.flush_cache())

    async def ReloadSchedules(
        self, request: pb.ReloadSchedulesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReloadSchedulesResponse:
        folder = Path(request.folder) if request.folder else self._schedules_folder
        if folder is None:
            raise InvalidRequestError("folder", "the server was started without --schedules: name a folder")
        try:
            schedules = await asyncio.to_thread(read_folder, folder)
        except StoreError as error:
            raise InvalidRequestError("folder", str(error)) from None
        await self._frontend.schedules.replace(schedules)
        self._schedules_folder = folder
        return pb.ReloadSchedulesResponse(schedules=[_served_schedule(schedule) for schedule in schedules])


def _served_schedule(schedule: PipelineSchedule) -> pb.ServedSchedule:
    return pb.ServedSchedule(
        name=schedule.name,
        batch_tokens=schedule.batch_tokens,
        decode_share=schedule.decode_share or 0.0,
        mean_context=schedule.mean_context or 0.0,
        gain=gain(schedule),
        is_chosen=may_be_chosen(schedule),
    )


def _instance_info(link: InstanceLink[LiveRequest]) -> pb.InstanceInfo:
    capacity = link.instance.capacity
    return pb.InstanceInfo(
        name=link.instance.name,
        page_size=capacity.page_size,
        total_pages=capacity.num_pages,
        max_running=capacity.max_slots,
        max_model_len=capacity.max_model_len,
        max_batch_tokens=capacity.max_batch_tokens,
    )


def _instance_load(link: InstanceLink[LiveRequest], healthy: bool) -> pb.InstanceLoad:
    capacity, load = link.instance.capacity, link.load
    answer = pb.InstanceLoad(
        name=link.instance.name,
        healthy=healthy,
        max_running=capacity.max_slots,
        free_pages=capacity.num_pages,
        total_pages=capacity.num_pages,
        page_size=capacity.page_size,
        batch_fill=link.batch_fill,
        generation_throughput=link.tokens_per_s(),
        cache_hit_rate=link.prefix_hits / max(link.prefix_queries, 1),
    )
    if load is not None:  # it has said nothing before its first request
        answer.running = load.num_running
        answer.waiting = load.num_waiting
        answer.waiting_tokens = load.num_waiting_tokens
        answer.live_pages = load.live_pages
        answer.cached_pages = load.cached_pages
        answer.free_pages = load.free_pages
        answer.total_pages = load.total_pages
        answer.token_usage = load.live_pages / max(load.total_pages, 1)
    return answer
