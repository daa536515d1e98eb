#!/bin/bash
# Run a stage on two simulated machines (network namespaces) with torchrun's rendezvous, as described in docs/several-gpus.md.
# Needs root and iproute2: [NPROC=2] [SERVER=COMMAND] scripts/two_hosts.sh ppo runs/ci/ppo.yaml [KEY=VALUE ...]
# NPROC processes run on each; COMMAND, a rollout server, on a third machine with address 10.77.0.3, until the stage ends.
set -euo pipefail
stage=$1 config=$2
shift 2

host() { echo "rlhf-$$-$1"; } # the namespace of machine number $1; number 0 is the switch between them

finish() {
    [ -z "${server:-}" ] || kill "$server" || true
    for number in 0 1 2 3; do ip netns del "$(host "$number")" || true; done
}
trap finish EXIT
for number in 0 1 2 3; do ip netns add "$(host "$number")"; done
ip -n "$(host 0)" link add switch type bridge
ip -n "$(host 0)" link set switch up
for number in 1 2 3; do
    ip link add "rlhf$number" netns "$(host "$number")" type veth peer name "port$number" netns "$(host 0)"
    ip -n "$(host 0)" link set "port$number" master switch up
    ip -n "$(host "$number")" addr add "10.77.0.$number/24" dev "rlhf$number"
    ip -n "$(host "$number")" link set "rlhf$number" up
    ip -n "$(host "$number")" link set lo up
done

run() { # start the processes of machine number $1
    ip netns exec "$(host "$1")" env GLOO_SOCKET_IFNAME="rlhf$1" OMP_NUM_THREADS=1 NO_PROXY=10.77.0.3 \
        "${PYTHON:-python}" -m torch.distributed.run --nnodes 2 --nproc-per-node "${NPROC:-1}" \
        --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-conf "is_host=$((2 - $1))" --local-addr "10.77.0.$1" \
        -m rlhf_cli "$stage" --config "$config" "${@:2}"
}
if [ -n "${SERVER:-}" ]; then
    ip netns exec "$(host 3)" bash -c "exec $SERVER" &
    server=$!
fi
run 2 "$@" &
other=$!
run 1 "$@"
wait "$other"
