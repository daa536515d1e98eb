# docker build -t rlhf .                                                             torch for the CPU
# docker build -t rlhf --build-arg INDEX=https://pypi.org/simple .                   torch for CUDA: run with --gpus all
# docker run --rm -v "$PWD:/work" rlhf init demo runs/demo                           any command of rlhf
# docker run --rm --entrypoint make rlhf -C /rlhf smoke                              the whole chain on tiny models
FROM python:3.13-slim

ARG INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=$INDEX \
    PIP_NO_CACHE_DIR=1 \
    VENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH

# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*

# First what changes rarely: the libraries stay in a layer of their own.
WORKDIR /rlhf
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY rlhf_cli/__init__.py rlhf_cli/
RUN make /opt/venv/.installed && pip install -c constraints.txt -e '.[judge,label,qlora,trackers,verifiers]'

COPY . .
WORKDIR /work
ENTRYPOINT ["rlhf"]
