# vLLM with the Mooncake transfer engine, for instances that hand KV to each other.
# Build from the root of the repository: docker build -f deploy/docker/engine.Dockerfile -t pointsman-engine:0.1.0 .
FROM vllm/vllm-openai:v0.32.0
# The image is built for CUDA 13, and the wheel without a suffix looks for libcudart.so.12.
RUN python3 -m pip install --no-cache-dir mooncake-transfer-engine-cuda13==0.3.13.post1
# vLLM's KV cache is part of a larger allocation, which Mooncake can register through dma-buf only.
ENV WITH_NVIDIA_PEERMEM=0
# How long an engine keeps KV that the other one does not fetch, and with 60 s more waits for KV that does not come: 480 s otherwise.
ENV VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=60
# What instances hand KV over with, layer by layer, and what tells agents of each step. It needs nothing that is not there.
COPY connector /opt/pointsman-connector
# A new volume for models takes its owner from the folder made here.
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation /opt/pointsman-connector \
    && install -d -o 2000 -g 0 -m 775 /models
# The user `vllm` of the image, by number: Kubernetes cannot tell that a named user is not root.
USER 2000:0
ENTRYPOINT ["vllm", "serve"]
