"""A new process's first attention: `python -m benchmarks.cold_start decode|prefill` prints its seconds as JSON.

Compiled kernels are cached in TRITON_CACHE_DIR: an empty folder there makes the start a cold one.
"""

import time

begin = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402

import evenshare  # noqa: E402

LENGTHS = {"decode": (1, 1024), "prefill": (512, 512)}  # query and key tokens of a request
BATCH, PAGE_SIZE, HEADS, HEAD_DIM = 4, 16, (32, 8), 128


def first_call(phase: str) -> None:
    """Paged attention of a small batch, from its tensors to the result."""
    device = torch.device("cuda")
    qo_len, kv_len = LENGTHS[phase]
    pages = kv_len // PAGE_SIZE
    q = torch.randn(BATCH * qo_len, HEADS[0], HEAD_DIM, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, BATCH * pages, PAGE_SIZE, HEADS[1], HEAD_DIM, dtype=torch.bfloat16, device=device)
    evenshare.paged_attention(
        q,
        k,
        v,
        qo_indptr=torch.arange(BATCH + 1, device=device) * qo_len,
        block_table=torch.arange(BATCH * pages, device=device).view(BATCH, pages),
        kv_lens=torch.full((BATCH,), kv_len, device=device),
    )
    torch.cuda.synchronize()


if __name__ == "__main__":
    evenshare.paged_attention  # noqa: B018  # imported on first use
    imported = time.perf_counter()
    torch.zeros(1, device="cuda").item()  # the CUDA context
    ready = time.perf_counter()
    first_call(sys.argv[1])
    done = time.perf_counter()
    print(json.dumps({"imports": imported - begin, "CUDA context": ready - imported, "first result": done - imported}))
