# SPDX-License-Identifier: Apache-2.0
"""What happens to one SchedulerOutput: the model, its K/V, its tokens."""
