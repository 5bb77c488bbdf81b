// Plain memory of the operating system.
#pragma once

#include <cstdint>

namespace heddle {

// `bytes` > 0, 64-byte aligned; from 64 KiB on, blocks begin at different places of their first
// page; from 2 MiB on each is a mapping of its own, from a 2 MiB boundary, that asks for huge
// pages. Null if there is none.
void* TakeFromSystem(std::int64_t bytes) noexcept;
void ReturnToSystem(void* block, std::int64_t bytes) noexcept;

}  // namespace heddle
