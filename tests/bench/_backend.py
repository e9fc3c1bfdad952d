"""Minimal backend in pure Python: raw sockets, prebuilt answers.

`python -m tests.bench._backend PORT CHUNKS`. Plain requests get a small chat completion; requests whose body holds
`"stream":true` get CHUNKS events, one write per loop iteration, then usage and [DONE]. `/metrics` reports a healthy
server.
"""

import asyncio
import sys

import uvloop

USAGE = b'"usage":{"prompt_tokens":8,"total_tokens":%d,"completion_tokens":%d}'


def plain(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ANSWER = plain(
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Hello there."},"finish_reason":"stop"}],%b}' % (USAGE % (12, 4))
)
METRICS = plain(
    b'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
    b'vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="100000000",num_gpu_blocks="6250000"} 1.0\n',
    b"text/plain",
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = chunked(
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class Answering(asyncio.Protocol):
    chunks = 64

    def connection_made(self, transport):
        self.transport = transport
        self.data = b""

    def data_received(self, data):
        self.data += data
        while True:
            head_end = self.data.find(b"\r\n\r\n")
            if head_end < 0:
                return
            head = self.data[:head_end].lower()
            length = 0
            at = head.find(b"content-length:")
            if at >= 0:
                length = int(head[at + 15 : (head + b"\r\n").find(b"\r\n", at)])
            end = head_end + 4 + length
            if len(self.data) < end:
                return
            body, self.data = self.data[head_end + 4 : end], self.data[end:]
            if head.startswith(b"get"):
                self.transport.write(METRICS)
            elif b'"stream":true' in body:
                self.transport.write(HEAD)
                self.loop = asyncio.get_running_loop()
                self.with_usage = b'"include_usage":true' in body
                self.loop.call_soon(self.stream, self.chunks)
            else:
                self.transport.write(ANSWER)

    def stream(self, left):
        if left:
            self.transport.write(EVENT)
            self.loop.call_soon(self.stream, left - 1)
            return
        usage = USAGE % (8 + self.chunks, self.chunks)
        last = chunked(b'data: {"id":"chatcmpl-1","choices":[],%b}\n\n' % usage) if self.with_usage else b""
        self.transport.write(last + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def main(port: int, chunks: int) -> None:
    Answering.chunks = chunks
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
