// SPDX-License-Identifier: Apache-2.0
// Coverage mode: the compiler makes a flag for each basic block of a kernel and a table of their
// addresses, and passes both when the kernel is loaded. Python finds them by their sections.

extern "C" {
void __sanitizer_cov_bool_flag_init(bool*, bool*) {}
void __sanitizer_cov_pcs_init(const unsigned long*, const unsigned long*) {}
}
