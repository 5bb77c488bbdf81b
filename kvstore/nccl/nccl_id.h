// The ids of communicators as text.
#pragma once

#include <string>
#include <string_view>

#include "kvstore/nccl/nccl_api.h"

namespace heddle::kvstore {

std::string TextOf(const Nccl::Id& id);  // 256 hexadecimal digits
// InvalidArgument for anything else; `name` says whose value it is.
Nccl::Id IdOf(std::string_view name, std::string_view text);

}  // namespace heddle::kvstore
