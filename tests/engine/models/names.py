# SPDX-License-Identifier: Apache-2.0
"""Maps mlx-lm's modules to names of served models."""

#: Modules that are parts of others.
HELPERS = frozenset(
    (
        *("__init__", "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla"),
        *("pipeline", "rope_utils", "ssm", "switch_layers"),
    )
)
#: Real weights that the tests load.
REAL = {"llama": "SmolLM2-135M"}
#: Modules that read transformers' published test models of embedded text models.
PUBLISHED_AS = {"minimax_m2": "minimax", "falcon_mamba": "mamba", "mistral": "llama"}

_TEXT = """
Klear                 Kwai-Klear/Klear-46B-A2.5B-Instruct
afm7                  apple's AFM 7B
afmoe                 arcee-ai/Trinity-Mini
apertus               swiss-ai/Apertus-8B-Instruct
baichuan_m1           baichuan-inc/Baichuan-M1-14B-Instruct
bailing_hybrid        inclusionAI/Ring-2.5-1T
bailing_moe           inclusionAI/Ling-lite
bailing_moe_linear    inclusionAI/Ring-mini-linear-2.0
bailing_moe_v3        inclusionAI's Bailing MoE V3
bitnet                microsoft/bitnet-b1.58-2B-4T
cohere                CohereLabs/c4ai-command-r-v01
cohere2               CohereLabs/c4ai-command-r7b-12-2024
dbrx                  databricks/dbrx-instruct
deepseek              deepseek-ai/deepseek-moe-16b-chat
deepseek_v2           deepseek-ai/DeepSeek-V2-Lite-Chat
deepseek_v3           deepseek-ai/DeepSeek-V3
deepseek_v32          deepseek-ai/DeepSeek-V3.2
deepseek_v41          DeepSeek V4.1
dots1                 rednote-hilab/dots.llm1.inst
ernie4_5              baidu/ERNIE-4.5-0.3B-PT
ernie4_5_moe          baidu/ERNIE-4.5-21B-A3B-PT
exaone                LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct
exaone4               LGAI-EXAONE/EXAONE-4.0-1.2B
exaone_moe            LGAI-EXAONE/K-EXAONE-236B-A23B
falcon_h1             tiiuae/Falcon-H1-7B-Instruct
gear                  Gear
gemma                 google/gemma-2b-it
gemma2                google/gemma-2-9b-it
gemma3                google/gemma-3-4b-it
gemma3_text           google/gemma-3-1b-it
gemma3n               google/gemma-3n-E4B-it
gemma4                Gemma 4, with images
gemma4_text           Gemma 4, text
glm                   zai-org/glm-4-9b-chat-hf
glm4                  zai-org/GLM-4-9B-0414
glm4_moe              zai-org/GLM-4.5-Air
glm4_moe_lite         zai-org/GLM-4.7-Flash
glm_moe_dsa           zai-org/GLM-5
gpt2                  openai-community/gpt2
gpt_bigcode           bigcode/gpt_bigcode-santacoder
gpt_neox              EleutherAI/pythia-1b
gpt_oss               openai/gpt-oss-20b
gptj                  EleutherAI/gpt-j-6b
granite               ibm-granite/granite-3.3-8b-instruct
granitemoe            ibm-granite/granite-3.1-3b-a800m-instruct
granitemoehybrid      ibm-granite/granite-4.0-h-small
helium                kyutai/helium-1-2b
hunyuan               tencent/Tencent-Hunyuan-Large
hunyuan_v1_dense      tencent/Hunyuan-7B-Instruct
internlm2             internlm/internlm2_5-7b-chat
internlm3             internlm/internlm3-8b-instruct
iquestloopcoder       IQuestLab/IQuest-Coder-V1-40B-Loop-Instruct
jamba                 ai21labs/AI21-Jamba-Reasoning-3B
kimi_k25              moonshotai/Kimi-K2.5
kimi_k3               Kimi K3
kimi_linear           moonshotai/Kimi-Linear-48B-A3B-Instruct
kimi_vl               moonshotai/Kimi-VL-A3B-Instruct
laguna                poolside's Laguna
lfm2-vl               LiquidAI/LFM2-VL-1.6B
lfm2                  LiquidAI/LFM2-1.2B
lfm2_moe              LiquidAI/LFM2-8B-A1B
lille-130m            Nikity/lille-130m-instruct
llama                 meta-llama/Llama-3.2-1B-Instruct
llama4                meta-llama/Llama-4-Scout-17B-16E-Instruct
llama4_text           facebook/MobileLLM-R1-950M
longcat_flash         meituan-longcat/LongCat-Flash-Chat
longcat_flash_ngram   meituan-longcat/LongCat-Flash-Lite
mamba                 state-spaces/mamba-1.4b-hf
mamba2                mistralai/Mamba-Codestral-7B-v0.1
mellum                JetBrains' Mellum 2
mimo                  XiaomiMiMo/MiMo-7B-RL
mimo_v2_flash         XiaomiMiMo/MiMo-V2-Flash
minicpm               openbmb/MiniCPM-2B-sft-bf16
minicpm3              openbmb/MiniCPM3-4B
minimax               MiniMaxAI/MiniMax-M2
minimax_m3_vl         MiniMax M3
ministral3            mistralai/Ministral-3-8B-Instruct-2512
mistral3              mistralai/Mistral-Small-3.2-24B-Instruct-2506
mistral4              Mistral 4
mixtral               mistralai/Mixtral-8x7B-Instruct-v0.1
muse_glimmer          Muse Glimmer
muse_spark            Muse Spark
nanbeige              Nanbeige/Nanbeige4-3B
nanochat              nanochat-students/nanochat-d20
nemotron-nas          nvidia/Llama-3_3-Nemotron-Super-49B-v1
nemotron              nvidia/Minitron-4B-Base
nemotron_h            nvidia/NVIDIA-Nemotron-Nano-9B-v2
olmo                  allenai/OLMo-7B-hf
olmo2                 allenai/OLMo-2-0425-1B-Instruct
olmo3                 allenai/Olmo-3-7B-Instruct
olmo_hybrid           allenai/Olmo-Hybrid-7B
olmoe                 allenai/OLMoE-1B-7B-0125-Instruct
openelm               apple/OpenELM-1_1B-Instruct
phi                   microsoft/phi-2
phi3                  microsoft/Phi-4-mini-instruct
phi3small             microsoft/Phi-3-small-8k-instruct
phimoe                microsoft/Phi-3.5-MoE-instruct
phixtral              mlabonne/phixtral-2x2_8
pixtral               mistral-community/pixtral-12b
plamo                 pfnet/plamo-13b-instruct
plamo2                pfnet/plamo-2-8b
plamo3                pfnet/plamo-3-nict-8b-base
prism_hadamard_qwen35 Qwen3.5 in Hadamard packs of two bits
qwen                  Qwen/Qwen-7B-Chat
qwen2                 Qwen/Qwen2.5-7B-Instruct
qwen2_moe             Qwen/Qwen1.5-MoE-A2.7B-Chat
qwen2_vl              Qwen/Qwen2-VL-7B-Instruct
qwen3                 Qwen/Qwen3-8B
qwen3_5               Qwen/Qwen3.5-9B
qwen3_5_moe           Qwen/Qwen3.5-35B-A3B
qwen3_moe             Qwen/Qwen3-30B-A3B-Instruct-2507
qwen3_next            Qwen/Qwen3-Next-80B-A3B-Instruct
qwen3_vl              Qwen/Qwen3-VL-8B-Instruct
qwen3_vl_moe          Qwen/Qwen3-VL-30B-A3B-Instruct
recurrent_gemma       google/recurrentgemma-2b-it
rwkv7                 fla-hub/rwkv7-1.5B-world
seed_oss              ByteDance-Seed/Seed-OSS-36B-Instruct
smollm3               HuggingFaceTB/SmolLM3-3B
solar_open            upstage/Solar-Open-100B
spark2_5              iFlytek's Spark 2.5
stablelm              stabilityai/stablelm-2-zephyr-1_6b
starcoder2            bigcode/starcoder2-3b
step3p5               stepfun-ai/Step-3.5-Flash
talkie                Talkie
telechat3             TeleAI's TeleChat 3
youtu_llm             tencent/Youtu-LLM-2B
"""
NAMES = dict(line.split(maxsplit=1) for line in _TEXT.strip().splitlines())
