# SPDX-License-Identifier: Apache-2.0
"""What a model needs and what a Mac has room for, from config.json and the sizes of files."""
