// Shared memory, and where it is while blocks take turns.
#pragma once
#include "fibres.h"

#pragma GCC visibility push(hidden)

// thread_local is the one storage class that is legal after `extern` and means static inside a function.
// All fibres share an OS thread, and the library's TLS block then holds shared memory and nothing else.
constexpr unsigned DYNAMIC_SHARED_BYTES = 256 * 1024;
extern thread_local unsigned char dynamic_shared[DYNAMIC_SHARED_BYTES];

namespace cuemu {
uint64_t random_number();
unsigned char* in_block(const Block& of, unsigned char* p);  // where a byte of its shared memory is now
}  // namespace cuemu

#pragma GCC visibility pop
