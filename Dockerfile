# Headstart with pinned versions, for CPUs by default. For CUDA: docker build --target cuda .
#   docker build -t headstart . && docker run --rm -v "$PWD:/work" headstart train recipe.yaml
FROM python:3.11-slim AS source
WORKDIR /headstart
COPY . .

FROM source AS cuda
RUN pip install --no-cache-dir "$(grep '^torch==' requirements.lock)"
RUN pip install --no-cache-dir --constraint requirements.lock ".[endpoint,gguf,wandb]"
WORKDIR /work
ENTRYPOINT ["headstart"]

FROM source AS cpu
RUN pip install --no-cache-dir "$(grep '^torch==' requirements.lock)+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint requirements.lock ".[endpoint,gguf,wandb]"
WORKDIR /work
ENTRYPOINT ["headstart"]
