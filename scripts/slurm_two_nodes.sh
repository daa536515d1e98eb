#!/bin/bash
# A Slurm of two nodes on this machine: `make slurm-test` submits the file of `rlhf launch slurm` to it.
# Needs root and Debian's slurm-wlm; without munge, so nothing of it may be reached from another machine.
#   scripts/slurm_two_nodes.sh start DIR    start slurmctld and two slurmd; prints the line that sets SLURM_CONF
#   scripts/slurm_two_nodes.sh node DIR N   start slurmd of node N again, after `kill`
#   scripts/slurm_two_nodes.sh stop DIR     end all three
set -euo pipefail
action=$1 dir=$(realpath -m "$2")
export SLURM_CONF=$dir/slurm.conf

start_node() { # the nodes are named by addresses of the loopback interface: a rendezvous finds them without /etc/hosts
    slurmd -N "127.0.0.$1"
}

case $action in
start)
    mkdir -p "$dir/state"
    cat > "$SLURM_CONF" <<CONF
ClusterName=two
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CryptoType=crypto/none
# A job that is queued again waits until its credential has expired: 120 s by default
AuthInfo=cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2
# Two nodes share the cores of this machine
SlurmdParameters=config_overrides
# A dead node is seen after 10 s, and is used again as soon as it is back
SlurmdTimeout=10
ReturnToService=2
KillWait=30
NodeName=127.0.0.[2-3] NodeHostname=$(hostname -s) Port=[16818-16819] CPUs=2 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
CONF
    slurmctld
    start_node 2
    start_node 3
    for _ in $(seq 60); do
        if sinfo -h -o '%D %t' | grep -q '^2 idle'; then
            echo "export SLURM_CONF=$SLURM_CONF"
            exit
        fi
        sleep 0.5
    done
    sinfo -N -l >&2
    exit 1
    ;;
node) start_node "$3" ;;
stop)
    for file in "$dir"/*.pid; do
        kill "$(cat "$file")" || true
    done
    ;;
esac
