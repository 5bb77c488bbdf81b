// The optimizers whose updates GPUs make.
#pragma once

#include <typeinfo>

#include "kvstore/optimizer/adabelief-inl.h"
#include "kvstore/optimizer/adadelta-inl.h"
#include "kvstore/optimizer/adagrad-inl.h"
#include "kvstore/optimizer/adam-inl.h"
#include "kvstore/optimizer/adamax-inl.h"
#include "kvstore/optimizer/adamw-inl.h"
#include "kvstore/optimizer/dcasgd-inl.h"
#include "kvstore/optimizer/ftml-inl.h"
#include "kvstore/optimizer/ftrl-inl.h"
#include "kvstore/optimizer/groupadagrad-inl.h"
#include "kvstore/optimizer/lamb-inl.h"
#include "kvstore/optimizer/lans-inl.h"
#include "kvstore/optimizer/lars-inl.h"
#include "kvstore/optimizer/lbsgd-inl.h"
#include "kvstore/optimizer/nadam-inl.h"
#include "kvstore/optimizer/nag-inl.h"
#include "kvstore/optimizer/rmsprop-inl.h"
#include "kvstore/optimizer/sgd_formulas-inl.h"
#include "kvstore/optimizer/sgld-inl.h"
#include "kvstore/optimizer/signum-inl.h"
#include "kvstore/optimizer/test-inl.h"
#include "kvstore/optimizer/update_rule.h"

namespace heddle::kvstore::cuda {

template <class... Numbers>
struct NumbersList {
  // Calls visit with the numbers, as what they are. False if they are none of these.
  template <class Visit>
  static bool VisitOne(internal::RuleNumbers numbers, const Visit& visit) {
    const auto visit_if = [&]<class One>(const One* /*which*/) {
      if (numbers.type == nullptr || *numbers.type != typeid(One)) return false;
      visit(*static_cast<const One*>(numbers.value));
      return true;
    };
    return (visit_if(static_cast<const Numbers*>(nullptr)) || ...);
  }
};

// Sorted by name. Each has a Plan (plans.h), which a .cu file beside it instantiates.
using AllNumbers =
    NumbersList<AdaBeliefNumbers, AdaDeltaNumbers, AdaGradNumbers, AdamNumbers, AdamaxNumbers,
                AdamWNumbers, DcaSgdNumbers, FtmlNumbers, FtrlNumbers, GroupAdaGradNumbers,
                LambNumbers, LansNumbers, LarsNumbers, LbSgdNumbers, NadamNumbers, NagNumbers,
                RmsPropNumbers, SgdNumbers, SgldNumbers, SignumNumbers, TestNumbers>;

}  // namespace heddle::kvstore::cuda
