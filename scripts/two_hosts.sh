#!/bin/bash
# Run a stage on two simulated machines (network namespaces) with torchrun's rendezvous, as described in docs/several-gpus.md.
# Needs root and iproute2: [NPROC=2] scripts/two_hosts.sh ppo runs/ci/ppo.yaml [KEY=VALUE ...], NPROC processes on each.
set -euo pipefail
stage=$1 config=$2
shift 2

for host in one two; do ip netns add "rlhf-$host"; done
trap 'for host in one two; do ip netns del "rlhf-$host"; done' EXIT
ip link add rlhf1 netns rlhf-one type veth peer name rlhf2 netns rlhf-two
for number in 1 2; do
    host=$([ "$number" = 1 ] && echo one || echo two)
    ip -n "rlhf-$host" addr add "10.77.0.$number/24" dev "rlhf$number"
    ip -n "rlhf-$host" link set "rlhf$number" up
    ip -n "rlhf-$host" link set lo up
done

run() { # start the processes of host number $1
    ip netns exec "rlhf-$([ "$1" = 1 ] && echo one || echo two)" env GLOO_SOCKET_IFNAME="rlhf$1" OMP_NUM_THREADS=1 \
        "${PYTHON:-python}" -m torch.distributed.run --nnodes 2 --nproc-per-node "${NPROC:-1}" \
        --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-conf "is_host=$((2 - $1))" --local-addr "10.77.0.$1" \
        -m rlhf_cli "$stage" --config "$config" "${@:2}"
}
run 2 "$@" &
other=$!
run 1 "$@"
wait "$other"
