# SPDX-License-Identifier: Apache-2.0
"""Classifies mlx-vlm's folders: a text model, another one's text model, or none."""


def _names(words: str) -> dict[str, str]:
    """Maps folders to reasons; each line has a reason, a colon, and folders."""
    lines = [line.partition(":") for line in words.strip().splitlines()]
    return {name: reason.strip() for reason, _, names in lines for name in names.split()}


#: Folders whose module does not generate from text alone, with reasons.
NOT_TEXT = _names("""
an encoder: bert embedding_gemma2 gemma3_embedding lfm2_colbert lfm2_embedding lfm2_encoder
an encoder, too: llama_bidirec llama_nemotron_vl_embedding ministral3_embedding modernbert
labels tokens: gliner2_5 openai_privacy_filter
embeds texts: qwen3_embedding qwen3_vl_embedding siglip xlm_roberta colidefics3 colqwen2_5
chooses among given answers: clef d1 d1_omni decider2 laya
detects or segments: dinov2 moge3 pp_doclayout_v3 rfdetr rt_detr_v2 sam3 sam3_1 sam3d_body
measures images: sam3d_objects sapiens2 video_depth_anything yolo11
makes images: bonsai ernie_image flux2 flux3 ideogram4 llada_image mage_flow ming_image
makes images, too: minimax_h3 moss_image qwen_image z_image
unmasks blocks of text (diffusion): diffusion_gemma llada2_moe nemotron_labs_diffusion
decodes what an encoder of images gives: florence2 nemotron_parse
several models, a pipeline: indic_ocr nemotron_voicechat
""")

#: Folders with the text model of an mlx-lm module or another folder, which is counted there.
SAME_TEXT = _names("""
Klear: klear
lille-130m: lille_130m
nemotron-nas: nemotron_nas
lfm2: lfm2_vl
qwen3_5: qwen3_5_text minicpmv4_6 minicpmv4_7
qwen3_5_moe: qwen3_5_moe_text
minimax_m3_vl: minimax_m3
deepseek_v3: mistral_large3
mimo_v2_flash: mimo_v2
step3p5: step3p7
gemma4_text: gemma4_unified
nemotron_h: nemotron_h_nano_omni
cohere2: aya_vision
deepseek_v2: deepseek_vl_v2 deepseekocr deepseekocr_2 unlimited_ocr
ernie4_5: paddleocr_vl
gemma: paligemma
glm4: glm4v
glm4_moe: glm4v_moe
granite: granite_vision granite4_vision
hunyuan_v1_dense: hunyuan_vl
llama: idefics2 idefics3 llava llava_next multi_modality smolvlm
phi: moondream2
phi3: phi3_v phi4_siglip phi4mm
plamo2: plamo2vl
qwen2: dots_ocr fastvlm got internvl_chat llava_bunny llava_onevision locateanything qwen2_5_vl
qwen3: internvl llmjpvl mage_vl minicpmo
qwen3_moe: qwen3_omni_moe
youtu_llm: youtu_vl
molmo2: molmo_point
""")

#: Modules of mlx-lm that wrap another one's text model, which is counted there.
SAME_TEXT_OF_MLX_LM = _names("""
gemma3_text: gemma3
gemma4_text: gemma4
deepseek_v3: kimi_k25 kimi_vl
lfm2: lfm2-vl
llama: mistral3 pixtral
qwen2: qwen2_vl
qwen3: qwen3_vl
qwen3_moe: qwen3_vl_moe
""")

#: Distinct text models without a row in `settings.mlx_vlm_models`, with reasons.
WITHOUT_ROW = _names("""
keeps an indexer's keys beside K and V: longcat_flash_sparse
feeds coordinates back that it reads from hidden states: falcon_perception
""")
