#include <heddle/c_api.h>
#include <heddle/optimizer.h>

#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "c_api/call.h"
#include "c_api/handles.h"

using heddle::c_api::Call;
using heddle::c_api::Free;
using heddle::c_api::NewHandle;
using heddle::c_api::Try;

HeddleStatus HeddleOptimizerCreate(const char* name, size_t count, const char* const* parameters,
                                   const double* values, HeddleOptimizer* optimizer) {
  return Try(__func__, [&](const Call& call) {
    HeddleOptimizer& result = call.Result("optimizer", optimizer);
    const std::string_view type = call.Text("name", name);
    const auto names = call.List("parameters", count, parameters);
    const auto numbers = call.List("values", count, values);
    std::vector<std::pair<std::string_view, double>> given;
    for (std::size_t i = 0; i < count; ++i) {
      given.emplace_back(call.Text(fmt::format("parameters[{}]", i), names[i]), numbers[i]);
    }
    result = NewHandle<HeddleOptimizer>(heddle::MakeOptimizer(type, given));
  });
}

HeddleStatus HeddleOptimizerFree(HeddleOptimizer optimizer) {
  return Free(__func__, "optimizer", optimizer);
}

HeddleStatus HeddleOptimizerSet(HeddleOptimizer optimizer, const char* parameter, double value) {
  return Try(__func__, [&](const Call& call) {
    call.Get("optimizer", optimizer)->Set(call.Text("parameter", parameter), value);
  });
}

HeddleStatus HeddleOptimizerGet(HeddleOptimizer optimizer, const char* parameter, double* value) {
  return Try(__func__, [&](const Call& call) {
    double& result = call.Result("value", value);
    result = call.Get("optimizer", optimizer)->Get(call.Text("parameter", parameter));
  });
}
