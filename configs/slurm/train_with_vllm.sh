#!/bin/bash
#SBATCH --job-name=trimtab
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#
# Two nodes train, the last one samples with vLLM:
#
#   sbatch configs/slurm/train_with_vllm.sh MODEL script.py --flags ...
#
# The script receives `--model MODEL` and the server's address in the variable ROLLOUT_URL. It hands that to its config:
# rollout_backend="vllm_server", rollout_backend_kwargs={"servers": [os.environ["ROLLOUT_URL"]], "weights_folder": ...}
# with a folder that all nodes share, or "weight_transfer": "nccl" in its place. The server ends with the training, and
# the training ends with the server.

set -euo pipefail

model=$1
shift
port=8000
config=${ACCELERATE_CONFIG:-configs/accelerate/two_nodes.yaml}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
server=${nodes[-1]}
trainers=("${nodes[@]:0:${#nodes[@]}-1}")
export ROLLOUT_URL="http://$server:$port"

srun --nodes=1 --ntasks=1 --nodelist="$server" --exact \
  env VLLM_SERVER_DEV_MODE=1 vllm serve "$model" --enable-scale-out --logprobs-mode processed_logprobs \
  --host 0.0.0.0 --port "$port" --tensor-parallel-size "$SLURM_GPUS_ON_NODE" &
serving=$!
trap 'kill "$serving" 2>/dev/null || true' EXIT

until curl --silent --fail "$ROLLOUT_URL/health" > /dev/null; do
  kill -0 "$serving" 2>/dev/null || { echo "vLLM ended on $server before it served $model." >&2; exit 1; }
  sleep 5
done

list=$(IFS=,; echo "${trainers[*]}")
srun --nodes="${#trainers[@]}" --ntasks="${#trainers[@]}" --nodelist="$list" --exact --kill-on-bad-exit=1 \
  bash -c 'exec accelerate launch --config_file "$1" --num_machines "$2" --num_processes "$3" \
    --machine_rank "$SLURM_PROCID" --main_process_ip "$4" --main_process_port 29500 "${@:5}"' \
  launch "$config" "${#trainers[@]}" "$((${#trainers[@]} * SLURM_GPUS_ON_NODE))" "${trainers[0]}" \
  "$@" --model "$model" &
training=$!

wait -n "$serving" "$training" || true
if kill -0 "$training" 2>/dev/null; then
  echo "vLLM ended on $server while $model trained." >&2
  kill "$training"
  exit 1
fi
wait "$training"
