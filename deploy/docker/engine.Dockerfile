# vLLM with the Mooncake transfer engine, for instances that transfer KV to each other.
# Build from the root of the repository: docker build -f deploy/docker/engine.Dockerfile -t pointsman-engine:0.3.0.dev0 .
FROM vllm/vllm-openai:v0.32.0
# The image is built for CUDA 13, and the wheel without a suffix looks for libcudart.so.12.
RUN python3 -m pip install --no-cache-dir mooncake-transfer-engine-cuda13==0.3.13.post1
# vLLM's KV cache is part of a larger allocation, which Mooncake can register only through dma-buf.
ENV WITH_NVIDIA_PEERMEM=0
# Time in s for which an engine keeps KV that the other engine does not fetch. An engine waits 60 s longer for KV that does not
# arrive. The default is 480 s.
ENV VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=60
# The package that transfers KV layer by layer and sends the load of each step to agents. Its dependencies are in the image.
COPY connector /opt/pointsman-connector
# A new volume for models gets its owner from the folder created here.
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation /opt/pointsman-connector \
    && install -d -o 2000 -g 0 -m 775 /models
# The user `vllm` of the image, by number, because Kubernetes cannot verify that a named user is not root.
USER 2000:0
ENTRYPOINT ["vllm", "serve"]
