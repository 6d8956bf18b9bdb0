"""Flags that vLLM has and we spell otherwise, need not, or do not have yet: what to do in place of each."""

_NOT_YET = "not yet: {}. docs/cli.md lists what waits"
_ONE_GPU = _NOT_YET.format("a server runs on one GPU, or on the CPU; start one a GPU behind a load balancer")
_LORA = _NOT_YET.format("adapters cannot be served; merge them into the checkpoint")
_DRAFTS = _NOT_YET.format("there is no speculative decoding")
_MEDIA = _NOT_YET.format("only texts are served, no images, sound or video")
_OFFLOAD = _NOT_YET.format(
    "weights and KV blocks stay on the device they run on; `compilerllm plan` says what fits"
)
_TRANSFER = _NOT_YET.format("prefill and decoding run in one process")
_NO_CODE = "code of a checkpoint is never run; a model is served if its architecture is known (README.md)"
_QUANTIZED = "the checkpoint says how it is quantised, and needs no flag; `--weights packed` or `dense` chooses what becomes of it"

# Flag -> what instead. Ours under another name first.
WHAT_INSTEAD: dict[str, str] = {
    "--gpu-memory-utilization": "here it is --memory-utilization, or --memory 24GiB",
    "--device-memory-utilization": "here it is --memory-utilization, or --memory 24GiB",
    "--kv-cache-memory-bytes": "here it is --kv-cache-bytes",
    "--num-gpu-blocks-override": "here it is --num-blocks",
    "--scheduling-policy": "here it is --policy",
    "--long-prefill-token-threshold": "here it is --max-prefill-chunk",
    "--max-num-queued-reqs": "here it is --max-num-waiting",
    "--enforce-eager": "here it is --optimization-level 1 (no CUDA graphs), or 0 (reference operations one by one)",
    "--compilation-config": "the pipeline is chosen by --optimization-level and --skip-passes",
    "-cc": "the pipeline is chosen by --optimization-level and --skip-passes",
    "--performance-mode": "here it is --optimization-level (0 to 3)",
    "--cudagraph-capture-sizes": "the buckets follow from --max-num-seqs; --optimization-level 1 has no CUDA graphs",
    "--enable-chunked-prefill": "long prompts are always computed in chunks; --max-prefill-chunk bounds them",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks; --max-prefill-chunk bounds them",
    "--disable-log-stats": "here it is --stats-interval 0",
    "--enable-log-requests": "here it is --log-requests metadata, or full",
    "--enable-log-outputs": "here it is --log-requests full",
    "--max-log-len": "here it is --request-log-bytes",
    "--uvicorn-log-level": "here it is --log-level",
    "--disable-uvicorn-access-log": "there is no access log unless --access-log asks for one",
    "--disable-access-log-for-endpoints": "--access-log leaves out health, metrics and other probes",
    "--enable-ssl-refresh": "SIGHUP reads the certificate and its key anew",
    "--enable-request-id-headers": "every answer has X-Request-Id",
    "--enable-server-load-tracking": "/load always counts",
    "--h11-max-incomplete-event-size": "here it is --max-header-bytes",
    "--structured-outputs-config": "here it is --structured-outputs-backend",
    "--guided-decoding-backend": "here it is --structured-outputs-backend",
    "--enable-auto-tool-choice": "calls are always told apart where a request has tools; --tool-call-parser none leaves them",
    "--tool-parser-plugin": "a plugin is an entry point of the group compilerllm.tool_parsers (docs/server.md)",
    "--reasoning-parser-plugin": "a plugin is an entry point of the group compilerllm.reasoning_parsers (docs/server.md)",
    "--tokenizer-pool-size": "here it is --tokenizer-threads",
    "--renderer-num-workers": "here it is --tokenizer-threads",
    "--collect-detailed-traces": "--otlp-traces-endpoint gives spans with queue, prefill and decode times",
    "--enable-opentelemetry": "--otlp-traces-endpoint alone turns traces on",
    "--served-model": "here it is --served-model-name",
    "--model": "MODEL stands without a flag: compilerllm serve MODEL",
    "--model-impl": "the checkpoint's configuration decides",
    "--task": "here it is --runner",
    "--enable-sleep-mode": _NOT_YET.format("a server holds its memory; end it, it starts warm"),
    "--trust-remote-code": _NO_CODE,
    "--quantization": _QUANTIZED,
    "-q": _QUANTIZED,
    "--quantization-config": _QUANTIZED,
    "--kv-cache-dtype": _NOT_YET.format("KV blocks have the type of the activations (--dtype)"),
    "--block-size": "the kernels' tiles decide it; the startup card and cache_config_info tell it",
    "--attention-backend": "the compiler picks the kernels; `compilerllm explain` says which and why",
    "--download-dir": "the hub's own variable says where files are kept: HF_HUB_CACHE",
    "--hf-token": "the hub's own variable has the token: HF_TOKEN",
    "--seed": "each request has a seed (the field `seed`)",
    "--disable-log-requests": "requests are not logged unless --log-requests asks for it",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--max-loras": _LORA,
    "--max-lora-rank": _LORA,
    "--max-cpu-loras": _LORA,
    "--speculative-config": _DRAFTS,
    "-sc": _DRAFTS,
    "--spec-method": _DRAFTS,
    "--spec-model": _DRAFTS,
    "--spec-tokens": _DRAFTS,
    "--tensor-parallel-size": _ONE_GPU,
    "-tp": _ONE_GPU,
    "--pipeline-parallel-size": _ONE_GPU,
    "-pp": _ONE_GPU,
    "--data-parallel-size": _ONE_GPU,
    "-dp": _ONE_GPU,
    "--enable-expert-parallel": _ONE_GPU,
    "-ep": _ONE_GPU,
    "--distributed-executor-backend": _ONE_GPU,
    "--nnodes": _ONE_GPU,
    "--node-rank": _ONE_GPU,
    "--limit-mm-per-prompt": _MEDIA,
    "--mm-processor-kwargs": _MEDIA,
    "--allowed-local-media-path": _MEDIA,
    "--cpu-offload-gb": _OFFLOAD,
    "--kv-offloading-size": _OFFLOAD,
    "--swap-space": _OFFLOAD,
    "--kv-transfer-config": _TRANSFER,
    "--kv-events-config": _TRANSFER,
    "--grpc-port": _NOT_YET.format("the API is HTTP alone"),
    "--middleware": _NOT_YET.format("put a proxy in front"),
    "--profiler-config": "`compilerllm explain --measure` and `compilerllm bench kernels` say where the time goes",
}


def what_instead(flag: str) -> str | None:
    """What to do in place of a flag of vLLM's; None if nothing is known of it."""
    return WHAT_INSTEAD.get(flag)
