"""What TRL's users had: the settings of its two best known examples, in each form that `--from-trl` reads.

The options of TRL's own classes, as their sources list them.
"""

# trl/trainer/ppo_config.py of TRL 0.11.4, in its order.
OF_OLD = """
exp_name seed log_with task_name model_name query_dataset reward_model remove_unused_columns tracker_kwargs
accelerator_kwargs project_kwargs tracker_project_name push_to_hub_if_best_kwargs steps learning_rate adap_kl_ctrl
init_kl_coef kl_penalty target horizon gamma lam cliprange cliprange_value vf_coef batch_size forward_batch_size
mini_batch_size gradient_accumulation_steps world_size ppo_epochs max_grad_norm optimize_cuda_cache
optimize_device_cache early_stopping target_kl compare_steps ratio_threshold use_score_scaling use_score_norm score_clip
whiten_rewards gradient_checkpointing is_encoder_decoder is_peft_model backward_batch_size global_backward_batch_size
global_batch_size dataset_num_proc"""
# trl/experimental/ppo/ppo_config.py of TRL 1.12.0, in its order.
OF_NEW = """
learning_rate dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size
num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty sft_model_path
world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size
push_to_hub reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards kl_coef kl_estimator
cliprange vf_coef cliprange_value gamma lam ds3_gather_for_generation"""
# trl/trainer/model_config.py and trl/scripts/utils.py of TRL 1.12.0, and what 0.11's had besides.
OF_SCRIPTS = """
model_name_or_path model_revision dtype torch_dtype trust_remote_code attn_implementation use_peft lora_r
lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora
use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name
dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers"""
OF_GENERATION = """
max_new_tokens min_length top_k top_p do_sample temperature pad_token_id eos_token_id repetition_penalty
num_beams"""

# TRL 0.11's first example: GPT-2 on film reviews, batches of 16.
SENTIMENT_YAML = """\
ppo_config:
  model_name: lvwerra/gpt2-imdb
  query_dataset: stanfordnlp/imdb
  reward_model: "sentiment-analysis:lvwerra/distilbert-imdb"
  learning_rate: 1.41e-5
  log_with: wandb
  batch_size: 16
  mini_batch_size: 16
  adap_kl_ctrl: True
generation_kwargs: {min_length: -1, top_k: 0.0, top_p: 1.0, do_sample: True, max_new_tokens: 32}
"""
SENTIMENT_JSON = """\
{
  "model_name": "lvwerra/gpt2-imdb", "query_dataset": "stanfordnlp/imdb",
  "reward_model": "sentiment-analysis:lvwerra/distilbert-imdb",
  "learning_rate": 1.41e-5, "log_with": "wandb", "batch_size": 16, "mini_batch_size": 16, "adap_kl_ctrl": true,
  "generation_kwargs": {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": true, "max_new_tokens": 32}
}
"""
SENTIMENT_SH = """\
#!/bin/bash
LR=1.41e-5   # as in the notebook
export MODEL="lvwerra/gpt2-imdb"
python sft.py --learning_rate 2e-5
python examples/scripts/ppo.py --model-name ${MODEL} --query_dataset=stanfordnlp/imdb \\
    --reward_model "sentiment-analysis:lvwerra/distilbert-imdb" \\
    --ppo_config.learning_rate $LR --log_with wandb \\
    --batch_size 16 --mini_batch_size 16 --adap_kl_ctrl True --max_new_tokens 32 > ppo.log 2>&1 | tee all.log
"""
SENTIMENT_PY = '''\
"""PPO on film reviews."""
import torch
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

RATE = 1.41e-5
SIZE = 4 * 4
config = PPOConfig(
    model_name="lvwerra/gpt2-imdb",
    learning_rate=RATE,
    log_with="wandb",
    batch_size=SIZE,
    mini_batch_size=SIZE,
    adap_kl_ctrl=True,
)


def build_dataset(config, name="stanfordnlp/imdb"):
    return load_dataset(name, split="train")


dataset = build_dataset(config)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset)
sentiment_pipe = pipeline("sentiment-analysis", model="lvwerra/distilbert-imdb", device=0)
generation_kwargs = {
    "min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": tokenizer.eos_token_id,
    "max_new_tokens": 32,
}
for epoch, batch in enumerate(ppo_trainer.dataloader):
    responses = ppo_trainer.generate(batch["input_ids"], generate_ref_response=False, **generation_kwargs)
'''
SENTIMENT = {".yaml": SENTIMENT_YAML, ".json": SENTIMENT_JSON, ".sh": SENTIMENT_SH, ".py": SENTIMENT_PY}

# TRL 1.12's example on TL;DR, with the command that its script tells.
TLDR_SH = """\
accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml --num_processes 8 \\
    examples/scripts/ppo/ppo_tldr.py \\
    --dataset_name trl-lib/tldr
    --dataset_test_split validation
    --output_dir models/minimal/ppo_tldr \\
    --learning_rate 3e-6 \\
    --per_device_train_batch_size 16 \\
    --gradient_accumulation_steps 4 \\
    --total_episodes 1000000 \\
    --model_name_or_path EleutherAI/pythia-1b-deduped \\
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \\
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \\
    --local_rollout_forward_batch_size 16 \\
    --missing_eos_penalty 1.0 \\
    --stop_token eos \\
    --eval_strategy steps \\
    --eval_steps 100
"""
TLDR_YAML = """\
dataset_name: trl-lib/tldr
dataset_test_split: validation
output_dir: models/minimal/ppo_tldr
learning_rate: 3e-6
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
total_episodes: 1_000_000
model_name_or_path: EleutherAI/pythia-1b-deduped
sft_model_path: cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr
reward_model_path: cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr
local_rollout_forward_batch_size: 16
missing_eos_penalty: 1.0
stop_token: eos
eval_strategy: steps
eval_steps: 100
"""
TLDR_JSON = """\
{"training_args": {"output_dir": "models/minimal/ppo_tldr", "learning_rate": 3e-6, "per_device_train_batch_size": 16,
   "gradient_accumulation_steps": 4, "total_episodes": 1000000, "missing_eos_penalty": 1.0, "stop_token": "eos",
   "local_rollout_forward_batch_size": 16, "eval_strategy": "steps", "eval_steps": 100,
   "sft_model_path": "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
   "reward_model_path": "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"},
 "script_args": {"dataset_name": "trl-lib/tldr", "dataset_test_split": "validation"},
 "model_args": {"model_name_or_path": "EleutherAI/pythia-1b-deduped"}}
"""
TLDR_PY = """\
from trl import ModelConfig, ScriptArguments
from trl.experimental.ppo import PPOConfig, PPOTrainer

script_args = ScriptArguments(dataset_name="trl-lib/tldr", dataset_test_split="validation")
model_args = ModelConfig(model_name_or_path="EleutherAI/pythia-1b-deduped")
common = {"stop_token": "eos", "missing_eos_penalty": 1.0, "local_rollout_forward_batch_size": 16}
training_args = PPOConfig(
    output_dir="models/minimal/ppo_tldr",
    learning_rate=3e-6,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,
    total_episodes=10**6,
    eval_strategy="steps",
    eval_steps=100,
    **common,
)
reward_model = AutoModelForSequenceClassification.from_pretrained(
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr", num_labels=1
)
policy = AutoModelForCausalLM.from_pretrained("cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr")
trainer = PPOTrainer(args=training_args, processing_class=tokenizer, model=policy, reward_model=reward_model)
"""
TLDR = {".sh": TLDR_SH, ".yaml": TLDR_YAML, ".json": TLDR_JSON, ".py": TLDR_PY}
