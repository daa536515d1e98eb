"""Bad lines of a config: each with its code, its place and its fix."""

import json
import re
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest
from bad_configs import HEAD, only

from rlhf_cli.config.loading import keys, load
from rlhf_cli.config.machinery.aliases import ALIASES
from rlhf_cli.config.stages import CONFIGS

pytestmark = pytest.mark.usefixtures("here")

# Stage, text around the line, line number: rows `line | CODE text | hint`.
# In a row, `...` stands for any text, and CODE@LINE for another line number.
TABLES = {
    ("ppo", f"{HEAD['ppo']}ppo:\n  total_episodes: 64\n  LINE\n", 5): r"""
kl_coeff: 0.1 | C01 unknown key ppo.kl_coeff | did you mean kl_coef?
zzzz: 1 | C01 unknown key ppo.zzzz | `rlhf explain ppo` lists the keys
init_kl_coef: 0.2 | C01 unknown key ppo.init_kl_coef | write kl_coef: 0.2
kl_penalty: mse | C01 unknown key ppo.kl_penalty | write kl_estimator: k2
sft_model_path: m | C01 unknown key ppo.sft_model_path | write models.sft: m
log_with: wandb | C01 unknown key ppo.log_with | write output.report_to: [wandb]
report_to: [wandb] | C02 ppo.report_to belongs under output: | indent it below `output:`
vllm_importance_sampling_cap: 2.0 | C01 unknown key ppo.vllm_... | use rollout_correction; {mode: ..., cap: 3.0}
overlong_buffer_len: 16 | C01 unknown key ppo.overlong_buffer_len | use overlong_penalty; {tokens: n, factor: f}
top_k: 50 | C01 unknown key ppo.top_k | responses are sampled from the full softmax, ...; remove the line
is_encoder_decoder: true | C01 unknown key ppo.is_encoder_decoder | encoder-decoder models are ...; remove the line
mini_batch_size: 4 | C01 unknown key ppo.mini_batch_size | use num_mini_batches; it counts minibatches: ...
snapshots: 3 | C02 ppo.snapshots belongs under output: | indent it below `output:`
seed: 3 | C02 ppo.seed belongs at the top of the file | write it on a separate line, without an indent
completion_only_loss: true | C02 ppo.completion_only_loss belongs in sft.yaml, under sft:
gamma: one | C05 ppo.gamma: expected a number > 0 and <= 1, got "one"
gamma: "0.9" | C05 ppo.gamma: expected a number > 0 and <= 1, got "0.9" | remove the quotes: 0.9
gamma: | C05 ppo.gamma: expected a number > 0 and <= 1, got nothing
num_ppo_epochs: 8.5 | C05 ppo.num_ppo_epochs: expected a whole number >= 1, got 8.5
num_ppo_epochs: 1e1 | C05 ppo.num_ppo_epochs: expected a whole number >= 1, got 10.0 | write 10
whiten_rewards: 1 | C05 ppo.whiten_rewards: expected true or false, got 1
gamma: 2 | C06 ppo.gamma: must be > 0 and <= 1, got 2
gamma: .nan | C06 ppo.gamma: must be a finite number > 0 and <= 1, got nan
kl_coef: .inf | C06 ppo.kl_coef: must be a finite number >= 0, got inf
kl_coef: 1e999 | C06 ppo.kl_coef: must be a finite number >= 0, got inf
kl_coef: -1 | C06 ppo.kl_coef: must be >= 0, got -1
kl_coef: true | C06 ppo.kl_coef: expected a number >= 0, got true
kl_in: rewards | C07 ppo.kl_in: "rewards" is not one of reward, loss, both | did you mean reward?
kl_in: 3 | C07 ppo.kl_in: 3 is not one of reward, loss, both
micro_batch_tokens: aut | C07 ppo.micro_batch_tokens: "aut" is not one of auto, a whole number | did you mean auto?
micro_batch_tokens: true | C06 ppo.micro_batch_tokens: expected a whole number >= 1 or auto, got true
response_length: [3] | C05 ppo.response_length: expected a whole number >= 1 or keys and values, got a list
response_length: {min: 3} | C05 ppo.response_length.max is missing | max: Maximum length limit in tokens
response_length: {min: 3, max: 2} | C06 ppo.response_length: min is greater than max | swap them
whiten_rewards: off | C10 ppo.whiten_rewards: expected true or false, got "off" | write true or false
num_ppo_epochs: 012 | C10 ppo.num_ppo_epochs: expected a whole number >= 1, got "012" | write a plain decimal number
gamma: 1:30 | C10 ppo.gamma: expected a number > 0 and <= 1, got "1:30" | write a plain decimal number
num_train_epochs: 1 | C17@3 ppo: set exactly one of total_episodes and num_train_epochs | e.g. total_episodes: 10000
num_mini_batches: 5 | C12 ppo: ...16 x 4 = 64 episodes ... cannot be divided by... | nearest values that fit: 2 or 4
""",
    ("ppo", f"{HEAD['ppo']}ppo: {{total_episodes: 64, LINE}}\n", 3): r"""
num_samples_per_prompt: 5 | C12 ppo: 16 x 4 = ... be divided by num_samples_per_prompt 5 | nearest ... fit: 2 or 4
stop_token: none, stop_token_id: 3 | C17 ppo: stop_token none and stop_token_id cannot be combined | remove one of them
warmup_steps: 1, warmup_ratio: 0.1 | C17 ppo: warmup_steps and warmup_ratio cannot be combined | remove warmup_ratio
lr_scheduler_type: constant, warmup_steps: 1 | C17 ppo: warmup_steps has no effect with ... constant | set constant_...
lr_scheduler_type: constant, warmup_ratio: 0.1 | C17 ppo: warmup_ratio has no effect with ... constant | set const...
lr_scheduler_type: constant, value_warmup_steps: 3 | C17 ppo: value_warmup_steps has no effect with ... | set ...
kl_in: loss | C17 ppo: kl_estimator k1 in the loss does not have the gradient ... | set kl_estimator: full, k2 or k3
kl_in: both | C17 ppo: kl_in both with kl_estimator k1 would count the KL of a token twice | set kl_estimator: full
kl_in: both, kl_estimator: full, whiten_rewards: true | C17 ppo: kl_in both ... whiten_rewards, ... | remove it
kl_in: both, kl_estimator: full, advantage: grpo, num_samples_per_prompt: 2 | C17 ppo: kl_in both ... | set kl_in: loss
fsdp: true, average: 0.9 | C17 ppo: fsdp cannot be combined with average, ... | remove one of them
fp16: true | C17 PPO cannot train in fp16: ... | set bf16: true
adap_kl_ctrl: true, kl_coef: 0.0 | C17 ppo: adap_kl_ctrl multiplies kl_coef, which is 0 | set kl_coef: 0.2, ...
adap_kl_ctrl: true, horizon: 12 | C06 ppo: horizon 12 lets one update of 64 ... make kl_coef negative | at least 13
value_only_updates: 1 | C17 ppo: value_only_updates 1 leaves no updates for the policy out of 1 ... | raise total_...
per_device_train_batch_size: 4, value_only_updates: 4 | C17 ppo: ...4 leaves no updates ... out of 4 ... | at most 3
per_device_train_batch_size: 4, value_only_updates: 5 | C17 ppo: ...5 leaves no updates ... out of 4 ... | at most 3
overlong_penalty: {tokens: 9, factor: 1}, response_length: 8 | C06 ppo: ...tokens 9 is more than ... 8 | at most 8
overlong_penalty: {tokens: 9, factor: 1}, response_length: {min: 8, max: 20} | C06 ppo: ...more than ... 8 | at most 8
watchdog: {actions: {kl: stop}, kl: null} | C17 watchdog.actions.kl has no effect: watchdog.kl is null | set a limit ...
watchdog: {kl_factor: 2.0} | C17 watchdog.kl_factor has no effect: no action is raise_kl_coef | set watchdog.action: ...
watchdog: {action: raise_kl_coef}, kl_coef: 0.0 | C17 ...raise_kl_coef multiplies kl_coef, which is 0 | set kl_coef ...
watchdog: {actions: {eos: raise_kl_coef}}, kl_coef: 0.0 | C17 ...raise_kl_coef ... kl_coef, which is 0 | set kl_coef ...
watchdog: {actions: {judge: stop}} | C17 ppo.watchdog.actions.judge has no effect without a source of weight 0 ... | ...
watchdog: {judge: 3.0} | C17 ppo.watchdog.judge has no effect without a source of weight 0 ... | docs/reward-hacking...
""",
    ("ppo", "data: {prompts: p}\nppo: {total_episodes: 64}\nrewards: LINE\n", 3): r"""
{a: {builtin: length, parameters: {most: 3}, weight: 0}} | C17 all rewards have weight 0, so ... | set the weight ...
{reward: {}, a: {function: 'a:b', weight: 0, clip: 1.0}} | C17 clip has no effect on a source of weight 0 | remove it
""",
    ("ppo", "data: {prompts: p}\nrewards: {x: LINE}\nppo: {total_episodes: 64}\n", 2): r"""
{function: 'os.system'} | C05 rewards.x.function: "os.system" has the wrong form | Python function module:function
{weight: 1} | C17 rewards.x: set exactly one of model, models, function, builtin... | a source named `reward` ...
{model: a, function: 'a:b'} | C17 rewards.x: set exactly one of model, models, function, builtin... | a source named ...
{builtin: length, function: 'a:b'} | C17 rewards.x: set exactly one of model, ... | a source named ...
{model: m, models: {a: m, b: m}} | C17 rewards.x: set exactly one of model, ... | a source named ...
{models: {one: m}} | C17 rewards.x: an ensemble needs at least two models | use model for a single one
{function: 'm:f', combine: min} | C17 rewards.x: combine has no effect without model or models | remove it
{models: {a: m, b: m}, std_coef: 2.0} | C17 rewards.x: std_coef has no effect without combine: mean_... | remove it
{function: 'a:b', parameters: {most: 3}} | C17 rewards.x: parameters has no effect without builtin | remove it
{builtin: repetition, timeout: 3.0} | C17 rewards.x: timeout has no effect without url | remove it
{builtin: repetition, label: x} | C17 rewards.x: label has no effect without pipeline | remove it
{model: m, batch_size: 3} | C17 rewards.x: batch_size has no effect without url or pipeline | remove it
{url: 'ftp://here'} | C05 rewards.x.url: "ftp://here" has the wrong form | URL of an HTTP endpoint that ...
{url: 'http://me@here/score'} | C16 rewards.x.url contains a secret: a login before the host | put it in a header ...
{weigth: 1, model: a} | C01 unknown key rewards.x.weigth | did you mean weight?
3 | C05 rewards.x: expected keys and values, got 3
numeric | C05 rewards.x: expected keys and values, got "numeric" | write {builtin: numeric}
my.score | C05 rewards.x: expected keys and values, got "my.score" | write {function: module:function}
{builtin: exact_match, column: answer} | C01 unknown key rewards.x.column | write parameters: {column: answer}
{builtin: length, most: 60} | C01 unknown key rewards.x.most | write parameters: {most: 60}
{builtin: length, weigth: 2} | C01 unknown key rewards.x.weigth | did you mean weight?
""",
    ("eval", "data: {prompts: p}\njudges: {mine: 'a:b'}\nmodels: {reward: r}\neval: {LINE}\n", 4): r"""
select: mein | C17 eval.select: mein does not name a judge of this file | did you mean mine?
select: {judge: zzzz} | C17 eval.select: zzzz does not name a judge of this file | available: mine, reward
max_kl: 0 | C06 eval.max_kl: must be > 0, got 0
select: {judge: mine, kl_max: 0} | C06 eval.select.kl_max: must be > 0, got 0
select: {judge: mine, kl: 3} | C01 unknown key eval.select.kl | ...
select: {kl_max: 3} | C05 eval.select.judge is missing | ...
select: ../x | S03 eval.select: not a valid name | ...
select: mine, frontier: false, interpolate: [] | C17 eval.select needs several policies ... | set eval.frontier...
frontier: false, interpolate: [], require: {selected.kl: "< 9"} | C17 eval.require: selected.kl needs several ... | ...
require: {win_rate.ppo_vs_sft.mein.value: "> 0"} | C17 eval.require: ...mein.value does not name a judge... | ...mine?
require: {win_rate.ppo_vs_stf.mine.value: "> 0"} | C17 ... does not name a comparison of the report | ...ppo_vs_sft?
require: {greedy.models.poo.kl: "> 0"} | C17 ...greedy.models.poo.kl does not name a policy of this file | ...mean ppo?
require: {model.ppo.kl: "> 0"} | C17 ...model.ppo.kl does not name a section of the report | did you mean models?
require: {win_rate.ppo_vs_sft.mine: "> 0"} | C17 ... is no number of the report | write win_rate.ppo_vs_sft.mine.value
select: mine, require: {selected.judges.mine: "> 0"} | C17 ... is no number ... | write selected.judges.mine.mean
select: mine, require: {selected.win_rate.mein.value: "> 0"} | C17 eval.require: ... does not name a judge... | ...mine?
""",
    ("eval", "data: {prompts: p}\njudges: {x: {openai: {url: 'http://a/v1', model: m}}}\nLINE\n", 3): r"""
eval: {select: x} | C17 eval.select: x compares two answers, and the frontier needs scores | select by a judge that ...
eval: {require: {win_rate.ppo_vs_sft.y.value: "> 0"}} | C17 ... does not name a judge of this file | available: ...
eval: {require: {greedy.win_rate.ppo_vs_sft.x.value: "> 0"}} | C17 eval.require: x compares sampled answers ... | ...
eval: {require: {models.ppo.judges.x.mean: "> 0"}} | C17 eval.require: x compares ... | write win_rate.ppo_vs_sft.x...
eval: {require: {models.ppo.judges.y.mean: "> 0"}} | C17 ... does not name a judge of this file | available: ...
eval: {require: {models.ppo.judges.reward: "> 0"}} | C17 ... is no number ... | write models.ppo.judges.reward.mean
models: {reward: null} | C17@2 judges.x compares answers, and the evaluation also needs a judge that scores... | ...
""",
    ("eval", "data: {prompts: p}\nmodels: {reward: null}\neval: {best_of: []}\njudges: LINE\n", 4): r"""
{reward: {openai: {url: 'http://a/v1', model: m}}} | C17 judges.reward: a judge that compares two ... | ...
""",
    ("eval", "data: {prompts: p}\njudges: {x: LINE}\n", 2): r"""
numeric | C17 judges.x: there is no folder numeric | write {builtin: numeric}
my.score | C17 judges.x: there is no folder my.score | a function is written module:function, ...
{builtin: regex, pattern: a} | C01 unknown key judges.x.pattern | write parameters: {pattern: a}
{} | C05 judges.x: a judge is either builtin, openai or labels | set one of them
{builtin: length, openai: {url: 'http://a/v1', model: m}} | C05 judges.x: a judge is either ... | ...
{openai: {model: m}} | C05 judges.x.openai.url is missing | url: Base address of the endpoint, ...
{openai: {url: 'http://a/v1', model: m}, parameters: {a: 1}} | C17 judges.x: parameters belong to builtin | ...
""",
    ("eval", "data: {prompts: p}\njudges: {x: {openai: {url: 'http://a/v1', model: m, LINE}}}\n", 2): r"""
rubrik: m | C01 unknown key judges.x.openai.rubrik | did you mean rubric?
rubric: '{first} {second}' | C17 judges.x.openai.rubric: lacks {prompt}: the judge ... | write {prompt}, ...
rubric: Who | C17 judges.x.openai.rubric: lacks {prompt}, {first}, {second}: ... | write {prompt}, ...
parameters: {n: 2} | C17 judges.x.openai.parameters: `n` is set by the judge itself | remove it
max_calls: 0 | C06 judges.x.openai.max_calls: must be > 0, got 0
key_env: sk-0 | C05 judges.x.openai.key_env: "sk-0" has the wrong form | ...
""",
    ("eval", "data: {prompts: p}\njudges: {x: {openai: {model: m, url: LINE}}}\n", 2): r"""
localhost:8000 | C17 judges.x.openai.url: not the base address ... | e.g. http://localhost...
http://a/v1/chat/completions | C17 judges.x.openai.url: not the base address ... | e.g. http://localhost...
http://a:b@c/v1 | C16 judges.x.openai.url contains a secret: a login before the host | ...
""",
    ("eval", f"{HEAD['eval']}LINE\n", 3): r"""
eval: {modes: []} | C06 eval.modes: needs at least 1, got 0
eval: {modes: [greedy, beam]} | C07 eval.modes.1: "beam" is not one of sampled, greedy
policies: {best_of_4: m} | C17 policies.best_of_4: the report uses this name | rename the policy
policies: {ppo: m} | C17 policies.ppo: the report uses this name | rename the policy
policies: {a_vs_b: m} | C17 policies.a_vs_b: the report uses this name | rename the policy
policies: {a b: m} | S03 policies.a b: not a valid name | ...
eval: {interpolate: [0.5, 2.1]} | C06 eval.interpolate.1: must be <= 2, got 2.1
eval: {interpolate: [0.5, 1]} | C17 ...eval.interpolate has 1, PPO's own policy... | remove it
eval: {interpolate: [0]} | C06 eval.interpolate.0: must be > 0, got 0
eval: {limit: {samples: 3}} | C06 eval.limit.samples: must be >= 4, got 3
eval: {best_of: [2, 1]} | C06 eval.best_of.1: must be >= 2, got 1
eval: {require: {a.b: 0.6}} | C07 eval.require.a.b: expected a comparison ...and a number | write "<= 0.6" or ">= 0.6"
eval: {require: {a.b: "20"}} | C07 eval.require.a.b: expected a comparison ... and a number | write "<= 20" or ">= 20"
eval: {require: {a.b: [3]}} | C05 eval.require.a.b: expected text, got a list
eval: {require: {a.b: high}} | C07 eval.require.a.b: expected a comparison operator and a number | e.g. ">= 0.6"
""",
    ("sft", f"{HEAD['sft']}LINE\n", 3): r"""
learning_rate: 1e-4 | C02 learning_rate belongs under sft: | indent it below `sft:`
ppo: {} | C02 ppo belongs in ppo.yaml
kl_coef: 1 | C02 kl_coef belongs in ppo.yaml, under ppo:
sft: {neftune_noise_alpha: 5} | C02 sft.neftune_... belongs under trainer: | indent it below `trainer:`
sft: {lr: 1e-4} | C01 unknown key sft.lr | write learning_rate: 0.0001
sft: 3 | C05 sft: expected keys and values, got 3
output: {run_name: 3} | C05 output.run_name: expected text, got 3 | write it in quotes: "3"
output: {report_to: [wandb, tensorbord]} | C07 output.report_to.1: "tensorbord" is not one of ... | did you mean ...?
output: {report_to: wandb} | C05 output.report_to: expected a list, got "wandb" | write [wandb]
output: {project: a/b} | S03 output.project: not a valid name | use letters, digits, `_`, `-` and `.`, ...
output: {keep: 1} | C06 output.keep: must be >= 2, got 1
output: {run_name: ../x} | S03 output.run_name: not a valid name | use letters, digits, `_`, `-` and `.`, ...
sft: {warmup_steps: 3, warmup_ratio: 0.1} | C17 sft: warmup_steps and ... cannot be combined | remove one of them
sft: {packing: 1} | C05 sft.packing: expected true or false, got 1
sft: {max_length: "8"} | C05 sft.max_length: expected a whole number > 1, got "8" | remove the quotes: 8
sft: {weight_decay: true} | C06 sft.weight_decay: expected a number >= 0, got true
sft: {weight_decay: .inf} | C06 sft.weight_decay: must be a finite number >= 0, got inf
seed: -1 | C06 seed: must be >= 0 and < 4294967296, got -1
run: 3 | C05 run: expected text, got 3 | write it in quotes: "3"
""",
    ("reward", "data: {train: t.jsonl}\nreward: {length_debias: true, LINE}\n", 2): r"""
normalize: none | C17 reward: length_debias measures its slope on the answers of normalize: sft | set ...
normalize_samples: 31 | C17 ...length_debias needs at least 32 answers, and normalize_samples is 31 | set normalize...
""",
    ("sft", f"{HEAD['sft']}trainer:\n  LINE\n", 4): r"""
neftune_noise_alfa: 5 | C01 unknown key trainer.neftune_noise_alfa: not a field of TRL's SFTConfig | did you mean ...
learning_rat: 1 | C01 unknown key trainer.learning_rat: not a field ... | did you mean sft.learning_rate?
max_length: 5 | C02 trainer.max_length belongs under sft: | indent it below `sft:`
output_dir: x | C02 trainer.output_dir is set by the pipeline | use run
save_strategy: no | C02 trainer.save_strategy is set by the pipeline | remove the line
push_to_hub: true | C02 trainer.push_to_hub is set by the pipeline | remove the line
resume_from_checkpoint: x | C02 trainer.resume_from_checkpoint is set by the pipeline | remove the line
overwrite_output_dir: true | C02 trainer.overwrite_output_dir is set by the pipeline | use --fresh
eval_strategy: steps | C02 trainer.eval_strategy is set by the pipeline | use sft.eval_steps
neftune_noise_alpha: high | C05 trainer.neftune_noise_alpha: expected a number, got "high"
label_smoothing_factor: true | C06 trainer.label_smoothing_factor: expected a number, got true
label_smoothing_factor: .nan | C06 trainer.label_smoothing_factor: must be a finite number, got nan
fp16: off | C10 trainer.fp16: expected true or false, got "off" | write true or false
dataloader_num_workers: 1.5 | C05 trainer.dataloader_num_workers: expected a whole number, got 1.5
optim: adamw_torchy | C07 trainer.optim: "adamw_torchy" is not one of adamw_torch, ... | did you mean adamw_torch?
""",
    ("sft", "model: {path: ./base}\ndata: {train: train.jsonl, LINE}\n", 2): r"""
eval: b.jsonl, eval_fraction: 0.1 | C17 data.eval and data.eval_fraction both define the held-out data | remove ...
split_seed: 1 | C17 data.split_seed has no effect without data.eval_fraction | add eval_fraction: 0.05
eval_fraction: 1.0 | C06 data.eval_fraction: must be > 0 and < 1, got 1.0
eval_fraction: 0.0 | C06 data.eval_fraction: must be > 0 and < 1, got 0.0
max_rows: 0 | C06 data.max_rows: must be > 0, got 0
format: transcript | C07 data.format: "transcript" is not one of ... transcripts, turns | did you mean transcripts?
on_bad: dorp | C07 data.on_bad: "dorp" is not one of error, drop | did you mean drop?
""",
    ("sft", "LINE\ndata: {train: t.jsonl}\n", 1): r"""
model: {} | C17 set model.path or model.new | path starts from an existing model, new from random weights
model: {path: a, new: {tokenizer: {train: t, vocab_size: 9}}} | C17 set model.path or model.new, not both | path ...
model: {new: {hidden_size: 8}} | C05 model.new.tokenizer is missing | tokenizer: Tokenizer to train for the new model
model: {new: {tokenizer: {train: t, vocab_size: 9}}, adapters: {kind: lora}} | C17 model.adapters needs a ... | ...
model: {path: a, chat_template: t.jinja} | C07 model: chat_template `t.jinja` is not a file, the text of ..., or chatml
""",
    ("sft", "model: {path: a, adapters: {LINE}}\ndata: {train: t.jsonl}\n", 1): r"""
kind: lora, lora_r: 8 | C01 unknown key model.adapters.lora_r | write r: 8
kind: dora | C07 model.adapters.kind: "dora" is not one of lora, qlora | did you mean lora?
r: 8 | C05 model.adapters.kind is missing | kind: Kind of the adapters
kind: lora, r: 0 | C06 model.adapters.r: must be > 0, got 0
kind: lora, lora_dropout: 1.0 | C06 model.adapters.lora_dropout: must be >= 0 and < 1, got 1.0
kind: lora, target_modules: all | C07 ...target_modules: "all" is not one of all-linear, a list | ...
""",
    (
        "ppo",
        f"{HEAD['ppo']}models: {{adapters: {{LINE}}}}\nppo: {{total_episodes: 64, num_shared_layers: 1}}\n",
        3,
    ): r"""
kind: qlor | C07 models.adapters.kind: "qlor" is not one of lora, qlora | did you mean qlora?
kind: lora, lora_dropout: 0.1 | C01 unknown key models.adapters.lora_dropout | keys here: kind, r, ...
kind: lora | C17@4 num_shared_layers cannot be combined with models.adapters, which share all layers | remove it
""",
    ("reward", f"{HEAD['reward']}LINE\n", 2): r"""
model: {adapters: {kind: lora, lora_dropout: 0.1}} | C17 ...lora_dropout has no effect: ... | ... remove lora_dropout
model: {new: {}} | C02 model.new belongs in sft.yaml, under model:
trainer: {packing_strategy: bfd} | C01 unknown key ...: not a field of TRL's RewardConfig | only SFTConfig has ...
""",
}


def bad_lines() -> list[tuple[str, str, str]]:
    """Return (stage, text of the file, printed message) of every row."""
    cases = []
    for (stage, text, number), table in TABLES.items():
        for row in table.strip().splitlines():
            line, message, *hint = row.split(" | ")
            code, _, problem = message.partition(" ")
            code, _, other_number = code.partition("@")
            error = f"error[{code}]: {stage}.yaml:{other_number or number}: {problem}"
            cases.append((stage, text.replace("LINE", line), "\nhint: ".join([error, *hint])))
    return cases


@pytest.mark.full
@pytest.mark.parametrize(("stage", "text", "message"), bad_lines())
def test_a_bad_line_has_a_code_a_place_and_a_fix(stage: str, text: str, message: str) -> None:
    pattern = re.escape(message).replace(r"\.\.\.", ".*")
    printed = only(stage, text)
    assert re.fullmatch(pattern, printed), printed


@pytest.mark.parametrize(
    ("stage", "text", "start"),
    [
        ("sft", "data: {train: t.jsonl}\n", "error[C17]: sft.yaml: set model.path or model.new\n"),
        ("reward", "seed: 1\n", "error[C05]: reward.yaml: data.train is missing\nhint: train: Pairs"),
        ("eval", "data: {prompts: p}\njudges: {reward: 'a:b'}\n", "error[C17]: eval.yaml:2: judges.reward: "),
        (
            "ppo",
            "data: {prompts: p}\nppo: {total_episodes: 64}\nrewards:\n  ../x: {function: 'a:b'}\n",
            "error[S03]: ppo.yaml:4: rewards.../x: not a valid name",
        ),
    ],
)
def test_a_missing_section_and_a_bad_name_are_located(stage: str, text: str, start: str) -> None:
    assert only(stage, text).startswith(start)


def test_good_fields_of_the_trainer_pass_and_the_dropout_of_a_rewards_adapters() -> None:
    fields = "{neftune_noise_alpha: 5, label_smoothing_factor: 0, optim: sgd, lr_scheduler_kwargs: {num_cycles: 2}}"
    Path("sft.yaml").write_text(f"{HEAD['sft']}trainer: {fields}\n")
    assert load("sft", "sft.yaml").trainer["lr_scheduler_kwargs"] == {"num_cycles": 2}
    text = "model: {adapters: {kind: lora, lora_dropout: 0.1}}\ntrainer: {disable_dropout: false}\n"
    Path("reward.yaml").write_text(HEAD["reward"] + text)
    assert load("reward", "reward.yaml").model.adapters.lora_dropout == 0.1


def test_old_names_point_at_keys_that_exist() -> None:
    paths = {key for stage in CONFIGS for key in keys(stage)}
    renamed = {alias.key for alias in ALIASES.values() if alias.key}
    assert renamed <= paths | {key.rpartition(".")[2] for key in paths}
    assert not ALIASES.keys() & {key.partition(".")[2] for key in keys("ppo")}
    assert all(alias.key or alias.note for alias in ALIASES.values())


def test_the_list_of_trl_fields_is_current() -> None:
    pytest.importorskip("trl")
    root = Path(__file__).parents[2]
    text = (root / "rlhf_cli" / "config" / "machinery" / "trl_fields.json").read_text(encoding="utf-8")
    made_from = json.loads(text)["made_from"]
    pins = dict(line.split("==") for line in (root / "constraints.txt").read_text().split() if "==" in line)
    assert made_from == {name: pins[name] for name in made_from}, "run scripts/trl_fields.py with the pinned versions"
    if made_from != {name: version(name) for name in made_from}:
        pytest.skip(f"made from {made_from}, other versions are installed")
    script = runpy.run_path(str(root / "scripts" / "trl_fields.py"))
    assert script["render"](script["describe"]()) == text, "run scripts/trl_fields.py"


def test_a_choice_is_a_name_or_a_name_and_a_bound() -> None:
    head = "data: {prompts: p}\njudges: {mine: 'a:b'}\n"
    for section, bound in (("mine", None), ("{judge: mine}", None), ("{judge: mine, kl_max: 8}", 8.0)):
        Path("eval.yaml").write_text(f"{head}eval: {{select: {section}}}\n")
        selection = load("eval", Path("eval.yaml")).eval.selection
        assert selection is not None and (selection.judge, selection.kl_max) == ("mine", bound)
